"""Untrusted chat templates: rendered as transformers does, or ended with their process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jinja2.exceptions import TemplateError

from relax_events.models import chat_template
from relax_events.models.chat_template import ConfinedTemplate, compile_template

MESSAGES = [
    {"role": "user", "content": "<b>hällo</b> \ud800"},
    {"role": "assistant", "content": [{"type": "text", "text": "x"}]},
]
TEMPLATE = (
    "{{ bos }}{% for message in messages %}{% if message.role == 'user' %}"
    "{{ message.content | tojson }}{% else %}{% generation %}{{ message.content[0].text }}"
    "{% endgeneration %}{% endif %}{% endfor %}{{ messages | tojson(indent=2) | length }}"
)
BOMBS = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
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


def test_confined_template_renders_what_it_would_in_this_process() -> None:
    messages = [{**MESSAGES[0], "content": "<b>hällo</b>"}, MESSAGES[1]]
    variables: dict[str, Any] = {"messages": messages, "bos": "<s>", "tools": None}
    text = ConfinedTemplate(TEMPLATE).render(variables)
    assert text == compile_template(TEMPLATE).render(variables)
    assert text.startswith('<s>"<b>hällo</b>"x')


def test_rejection_of_a_template_has_its_words() -> None:
    template = ConfinedTemplate("{{ raise_exception('no system message') }}")
    with pytest.raises(TemplateError, match=r"^no system message$"):
        template.render({})
    with pytest.raises(TemplateError, match="TypeError"):
        ConfinedTemplate("{{ 1 + 'a' }}").render({})


@pytest.mark.parametrize("name", sorted(BOMBS))
def test_bomb_in_a_template_ends_within_its_deadline_and_memory(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(chat_template, "RENDER_SECONDS", 3.0)
    monkeypatch.setattr(chat_template, "LOAD_SECONDS", 20.0)
    monkeypatch.setattr(chat_template, "MEMORY_BYTES", 512 * 1024**2)
    template = ConfinedTemplate(BOMBS[name] + "{{ messages | length }}")
    with pytest.raises(TemplateError):
        template.render({"messages": []})


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('touch MARK') }}",
        "{{ lipsum.__globals__['os'].system('touch MARK') }}",
        "{% include 'MARK' %}",
        "{{ self.__init__.__globals__ }}",
        "{{ messages.append.__self__.__class__.__base__.__subclasses__() }}",
    ],
)
def test_template_reaches_no_code(tmp_path: Path, source: str) -> None:
    mark = tmp_path / "mark"
    text = ""
    with pytest.raises(TemplateError):
        text = ConfinedTemplate(source.replace("MARK", str(mark))).render({"messages": []})
    assert not mark.exists()
    assert "class" not in text
