"""Parse answers in program syntax, such as `2*pi` and `x**2`, which a LaTeX grammar reads as
products of symbols.
"""

from __future__ import annotations

import re
import string
import tokenize
from functools import lru_cache
from typing import Any

CONSTANTS = ("pi", "oo")
FUNCTIONS = (
    "sqrt",
    "sin",
    "cos",
    "tan",
    "cot",
    "sec",
    "csc",
    "asin",
    "acos",
    "atan",
    "sinh",
    "cosh",
    "tanh",
    "log",
    "ln",
    "exp",
    "Abs",
)
NUMBER = r"(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d{1,3}(?!\d)|(?![eE][-+]?\d))"
"""Without a longer exponent: sympy writes such a number out, digit by digit."""
FUNCTION = rf"(?:{'|'.join(sorted(FUNCTIONS, key=len, reverse=True))})(?=\s*\()"
TOKEN = re.compile(
    rf"\s*(?:(?P<name>{FUNCTION}|(?:{'|'.join(CONSTANTS)})(?![a-zA-Z]))|{NUMBER}|[a-zA-Z](?![a-zA-Z])|\*\*|[-+*/^()])\s*"
)
NUMBER_BEFORE_NAME = re.compile(r"(?<![\d.])(\d+\.?\d*|\.\d+)(?=[a-zA-Z(])(?![eE][-+]?\d)")
ONLY_PLAIN = re.compile(r"\*|\d[eE][-+]?\d")
"""Syntax that LaTeX does not have."""


def plain_expression(text: str) -> Any:
    """Parse a text in program syntax to an unevaluated expression; None for any other text.

    Only numbers, single-letter symbols, the functions of `FUNCTIONS` and arithmetic are accepted,
    so parsing can't run other code.
    """
    sides = text.split("=")
    if len(sides) > 2 or not all(_is_plain(side) for side in sides):
        return None
    if not ONLY_PLAIN.search(text) and not any(
        match["name"] for side in sides for match in TOKEN.finditer(side)
    ):
        return None
    parts = [_parse(side.strip()) for side in sides]
    if any(part is None for part in parts):
        return None
    if len(parts) == 1:
        return parts[0]
    from sympy import Eq

    return Eq(parts[0], parts[1], evaluate=False)


def _is_plain(text: str) -> bool:
    position = 0
    while position < len(text):
        if (token := TOKEN.match(text, position)) is None:
            return False
        position = token.end()
    return position > 0


def _parse(text: str) -> Any:
    from sympy.parsing.sympy_parser import (
        convert_xor,
        implicit_multiplication,
        parse_expr,
        standard_transformations,
    )

    transformations = (*standard_transformations, convert_xor, implicit_multiplication)
    names, builtins = _names()
    try:
        return parse_expr(
            NUMBER_BEFORE_NAME.sub(r"\1*", text), names, transformations, builtins, evaluate=False
        )
    except (
        tokenize.TokenError,
        SyntaxError,
        TypeError,
        ValueError,
        AttributeError,
    ):  # "2 * * 3", "sin + 1", "sqrt()"
        return None


@lru_cache(maxsize=1)
def _names() -> tuple[dict[str, Any], dict[str, Any]]:
    import sympy

    # As math-verify reads symbols: real, and i as one of them.
    symbols = {letter: sympy.Symbol(letter, real=True) for letter in string.ascii_letters}
    names = {
        **symbols,
        **{name: getattr(sympy, name) for name in CONSTANTS + FUNCTIONS},
        "e": sympy.E,
        "E": sympy.E,
        "I": symbols["i"],
    }
    return names, {name: value for name, value in vars(sympy).items() if not name.startswith("_")}
