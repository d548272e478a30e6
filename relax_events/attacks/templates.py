"""Chat templates that try to run code, read files, or never end."""

from __future__ import annotations

from pathlib import Path

BOMBS = {
    "nested loops": (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    ),
    "a large text": "{{ ('a' * 10**10) | length }}",
    "a doubled text": (
        "{% set n = namespace(x='aaaaaaaa') %}{% for i in range(60) %}"
        "{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x | length }}"
    ),
    "a wide field": "{{ '%9999999999d' % 1 }}",
    "a large number": "{{ 9 ** (9 ** 9) }}",
    "a centred text": "{{ 'a' | center(9999999999) | length }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
}
"""Must end within the bounds of time and memory."""


def template_codes(canary: Path) -> dict[str, str]:
    """Return templates that reach for code, by their means; each must be refused.

    Args:
        canary: A file that does not exist; code creates it.
    """
    return {
        "classes": "{{ ''.__class__.__mro__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "globals of a class": f"{{{{ cycler.__init__.__globals__.os.system('touch {canary}') }}}}",
        "globals of a function": f"{{{{ lipsum.__globals__['os'].system('touch {canary}') }}}}",
        "including a file": f"{{% include '{canary}' %}}",
        "importing a file": "{% import '/etc/passwd' as x %}{{ x }}",
        "globals of itself": "{{ self.__init__.__globals__ }}",
        "classes of a list": "{{ messages.append.__self__.__class__.__base__.__subclasses__() }}",
        "a format string": "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
        "attributes by filter": "{{ messages | attr('__class__') | attr('__base__') }}{{ 1 / 0 }}",
    }
