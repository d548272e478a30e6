"""Which texts a library may evaluate while it scores a completion."""

from __future__ import annotations

import pytest

from relax_events.packages.verifiers.evaluated_text import (
    MAX_CHARACTERS,
    Grammar,
    check_text,
)

LITERALS = [
    "1", "-1", "1.5", "'a'", "True", "None", "[1, 2]", "(1, 'a')", "{1, 2}", "{'a': [1]}", "[]",
    "[['Q', '_'], ['_', 'Q']]", "1 + 2", "(0x1 << 2) - ~0x3 ^ 5 & 7 | 1", "2**64", "b'a'", " 1 ",
]  # fmt: skip
FORMULAS = [
    "Integer (1 )+Integer (2 )", "Symbol ('x')**Integer (2 )", "Float ('1.5e3')", "x", "-x + C",
    "sin (x )*exp (-Symbol ('x'))", "Rational (1 ,2 )", "sqrt(2)", "pi", "log(x, 2)", "factorial(5)",
    "(x + 1)**50", "max(1, 2)", "Integer(10)**Integer(1000)",
]  # fmt: skip
NEITHER = [
    "f()", "open('a', 'w')", "a.b", "x.__class__", "a[0]", "lambda: 1", "(x := 1)", "[x for x in y]",
    "f'{x}'", "x if y else z", "1 < 2", "a and b", "*a", "await x", "yield", "x = 1", "import os",
    "print", "[open('a')]", "__import__('os')", "1; 2", "", "(", "9**9**9**9", "10**10**10",
    "factorial(10**9)", "1 << 10**12", "[0] * 10**11", "'a' * 10**11", "-" * 500 + "1",
    "(" * 500 + ")" * 500, "[" * 150 + "]" * 150, "1" + "+1" * MAX_CHARACTERS,
    "sin('__import__(\"os\")')", "S('x')", "sympify('x')", "Symbol('a b')", "Symbol(x, y)",
    "Float('1e999999999')", "Function('f')(x)", "Symbol(**{})", "sin(*[1])", "x**10**10", "a\0",
    "__debug__", "Integer(2).__class__",
]  # fmt: skip


@pytest.mark.parametrize("text", LITERALS)
def test_literal_is_accepted(text: str) -> None:
    check_text(text, Grammar.LITERAL)
    check_text(text.encode(), Grammar.LITERAL)


@pytest.mark.parametrize("text", FORMULAS)
def test_formula_is_accepted_for_sympy(text: str) -> None:
    check_text(text, Grammar.ARITHMETIC)


@pytest.mark.parametrize("text", [text for text in NEITHER if text != "print"])
def test_code_and_huge_numbers_are_refused_for_sympy(text: str) -> None:
    with pytest.raises(SyntaxError):
        check_text(text, Grammar.ARITHMETIC)


@pytest.mark.parametrize("text", [*NEITHER, "x", "Integer(1)", "pi"])
def test_code_and_names_are_refused_as_literals(text: str) -> None:
    with pytest.raises(SyntaxError):
        check_text(text, Grammar.LITERAL)
