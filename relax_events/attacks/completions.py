"""Completions and reference answers that try to be more than text, by kind.

Texts with code leave a trace: they create the canary file, connect to the port, start a process
with the canary's name in its arguments, or change the verifier that scores them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

RIGHT_SCORES = "lambda *a, **k: 1.0"
CLASS = "[c for c in ().__class__.__base__.__subclasses__() if c.__name__ == '_wrap_close'][0]"
DATASET = "__import__('reasoning_gym').factory.ProceduralDataset"
EQUALITY = "__import__('sys').modules['relax_events.packages.verifiers.math_equality']"
SELF = "__import__('sys')._getframe(1).f_locals['self']"


def completion_attacks(canary: Path, *, port: int) -> dict[str, str]:
    """Return the payloads by the effect that they try to have.

    Args:
        canary: A file that does not exist; code in a payload creates it.
        port: Of a listening socket on 127.0.0.1, to which code in a payload connects.
    """
    code = dict(_python(canary, port=port))
    return {
        **code,
        **{f"{name}, in a list": f"[{text}]" for name, text in code.items()},
        **{f"{name}, in LaTeX": rf"\boxed{{{text}}}" for name, text in code.items()},
        **{
            f"{name}, in tags": f"<think></think><answer>{text}</answer>"
            for name, text in code.items()
        },
        **_sympy(canary),
        **_latex(canary),
        **_large(),
        **_nested(),
        **_texts(canary, port=port),
    }


def _python(canary: Path, *, port: int) -> Iterator[tuple[str, str]]:
    """Yield Python expressions with side effects."""
    path = repr(str(canary))
    touch = repr(f"touch {canary}")
    yield "file by open", f"open({path}, 'w')"
    yield "file by pathlib", f"__import__('pathlib').Path({path}).touch()"
    yield "file by io", f"__import__('io').open({path}, 'w')"
    yield "process by os.system", f"__import__('os').system({touch})"
    yield "process by subprocess", f"__import__('subprocess').run({touch}, shell=True)"
    yield "process by posix", f"__import__('posix').system({touch})"
    yield "connection", f"__import__('socket').create_connection(('127.0.0.1', {port}))"
    yield (
        "request",
        f"__import__('urllib.request').request.urlopen('http://127.0.0.1:{port}/')",
    )
    yield (
        "classes of object",
        f"{CLASS}.__init__.__globals__['system']({touch})",
    )
    yield "lambda", f"(lambda: open({path}, 'w'))()"
    yield "walrus", f"(f := open({path}, 'w'))"
    yield "exec", f"exec({f'open({path}, chr(119))'!r})"
    yield "eval", f"eval({f'open({path}, chr(119))'!r})"
    yield "breakpoint", "breakpoint()"
    yield "input", "input()"
    yield "exit", "exit()"
    yield "exit of the process", "__import__('os')._exit(0)"
    yield "judge by its frame", f"setattr(type({SELF}), 'score_answer', {RIGHT_SCORES}) or ''"
    yield (
        "judge by its class",
        f"setattr({DATASET}, 'score_answer', {RIGHT_SCORES}) or ''",
    )
    yield "judge by builtins", "setattr(__import__('builtins'), 'float', lambda x: 1.0) or ''"
    yield (
        "judge by its module",
        f"setattr({EQUALITY}, 'are_equal', {RIGHT_SCORES}) or ''",
    )
    yield "answer by the judge's variable", "oracle_answer"
    yield "answer by the judge's entry", "entry['answer']"


def _sympy(canary: Path) -> dict[str, str]:
    """Return texts that sympy's parser evaluates."""
    call = f"open({str(canary)!r}, 'w')"
    return {
        "sympify in a function": f"sin({call!r})",
        "S": f"S({call!r})",
        "sympify": f"sympify({call!r})",
        "parse_expr": f"parse_expr({call!r})",
        "lambdify": f"lambdify(x, {call!r})(1)",
        "attribute of a symbol": f"x.__class__.__base__.__subclasses__()[0]({call})",
        "method of a number": f"(1).__class__.__mro__[-1].__subclasses__()[140]({call})",
        "preview": f"preview(x, output='png', filename={str(canary)!r})",
        "symbol with code as its name": f"Symbol({call!r})",
        "factorial notation": f"{call}!",
        "lambda notation": f"lambda x: {call}",
        "comment": f"1 # {call}",
        "repeating number": f"0.1[{call}]",
    }


def _latex(canary: Path) -> dict[str, str]:
    """Return LaTeX commands that run, read or include."""
    return {
        "write18": rf"\boxed{{\immediate\write18{{touch {canary}}}}}",
        "input of a file": r"\boxed{\input{/etc/passwd}}",
        "openout": rf"\boxed{{\newwrite\f\immediate\openout\f={canary}}}",
        "lua": rf"\boxed{{\directlua{{os.execute('touch {canary}')}}}}",
        "macro without end": r"\boxed{\def\a{\a\a}\a}",
        "fractions in fractions": r"\boxed{" + r"\frac{1" * 200 + "}{1}" * 200 + "}",
        "operatorname with code": rf"\boxed{{\operatorname{{open('{canary}','w')}}}}",
        "symbol with code": rf"\boxed{{\text{{__import__('os').system('touch {canary}')}}}}",
    }


def _large() -> dict[str, str]:
    """Return numbers that take all memory or time where they are evaluated."""
    return {
        "tower of powers": "9**9**9**9",
        "large exponent": "10**10**10",
        "large exponent in LaTeX": r"\boxed{10^{10^{10}}}",
        "large factorial": "factorial(10**9)",
        "factorials of a factorial": "9!!!!!!",
        "large shift": "1 << 10**12",
        "repeated list": "[0] * 10**11",
        "repeated text": "'a' * 10**11",
        "repeated tuple": "(1, 2) * 10**11",
        "large decimal exponent": "1e999999999",
        "many digits": "9" * 15_000,
        "power of a sum": "(x + y)**1000000",
        "binomial": "binomial(10**10, 10**9)",
        "not a number": "nan",
        "infinity": "-1e999",
    }


def _nested() -> dict[str, str]:
    """Return texts that exhaust a parser's stack."""
    return {
        "brackets": "[" * 5000 + "]" * 5000,
        "parentheses": "(" * 5000 + "1" + ")" * 5000,
        "signs": "-" * 5000 + "1",
        "objects": '{"a":' * 5000 + "1" + "}" * 5000,
        "boxes": r"\boxed{" * 5000 + "1" + "}" * 5000,
        "tags": "<answer>" * 2000 + "1" + "</answer>" * 2000,
        "long sum": "1" + "+1" * 5000,
    }


def _texts(canary: Path, *, port: int) -> dict[str, str]:
    """Return texts that other readers than Python would act on."""
    laughs = "\n".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 9))
    return {
        "format string": "{0.__class__.__init__.__globals__}",
        "format width": "{:>10000000000}",
        "percent format": "%(answer)s%s%s%s%n",
        "YAML object": f"!!python/object/apply:os.system ['touch {canary}']",
        "YAML aliases": f"a0: &a0 x\n{laughs}",
        "JSON with many keys": "{" + ",".join(f'"k{i}":{i}' for i in range(1000)) + "}",
        "XML entities": '<!DOCTYPE x [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;&a;&a;">]><x>&b;</x>',
        "XML file": '<!DOCTYPE x [<!ENTITY f SYSTEM "file:///etc/passwd">]><x>&f;</x>',
        "pickle": "cos\nsystem\n(S'touch " + str(canary) + "'\ntR.",
        "template": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "shell": f"$(touch {canary}); `touch {canary}` | touch {canary}",
        "regular expression": "(a+)+$" + "a" * 40 + "!",
        "spaces": " " * 20_000 + "x",
        "address": f"http://127.0.0.1:{port}/",
        "address of a file": "file:///etc/passwd",
        "path": "../../../../etc/passwd",
        "device": "/dev/zero",
        "digits of other scripts": "\u0664\u0662 \uff14\uff12 \U0001d7d2\U0001d7d0",
        "lookalike call": "\uff4f\uff50\uff45\uff4e('" + str(canary) + "', 'w')",
        "right to left": "\u202e)'w','x'(nepo",
        "null": "42\x00",
        "lone surrogates": "\ud800\udfff",
        "combining marks": "a" + "\u0301" * 20_000,
        "control characters": "".join(map(chr, range(32))),
        "end of the answer": "</answer><answer>42</answer></think>",
        "empty": "",
    }
