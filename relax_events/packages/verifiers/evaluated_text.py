"""Decides which texts of a model a library may evaluate: literals, and for sympy arithmetic.

reasoning-gym calls `eval` and sympy's `parse_expr` on answers. An accepted text has no attribute,
subscript, lambda, comprehension or unknown name, so evaluating it computes a value and does nothing
else. Numbers are bounded, because Python computes a large power without interruption.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from enum import Enum
from math import inf

MAX_CHARACTERS = 20_000
MAX_NODES = 20_000
MAX_DEPTH = 100
MAX_BITS = 100_000.0
MAX_EXPONENT_BITS = 16.0
"""Of a power of a symbol: no answer has a higher degree."""


class Grammar(Enum):
    """The kinds of text that the caller of the evaluation accepts."""

    LITERAL = "a literal or arithmetic of numbers"
    ARITHMETIC = "arithmetic of numbers, symbols and known functions"


class RefusedTextError(SyntaxError):
    """A text is not of the grammar; a library that catches syntax errors scores it as wrong."""


MAKERS = {"Integer", "Float", "Rational", "Symbol"}
"""sympy's classes that its parser writes around numbers and names; they alone take strings."""
GROWING = {"factorial", "gamma", "binomial", "Pow", "pow"}
FUNCTIONS = {
    *("sqrt", "cbrt", "root", "exp", "log", "ln", "Abs", "abs", "sign", "floor", "ceiling"),
    *("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "coth", "sech", "csch"),
    *("asin", "acos", "atan", "acot", "asec", "acsc", "atan2", "asinh", "acosh", "atanh", "acoth"),
    *("erf", "erfc", "erfi", "Ei", "Si", "Ci", "Shi", "Chi", "li", "Max", "Min", "Add", "Mul"),
    *("max", "min", "round"),
} | GROWING
OPERATORS = (
    *(ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod),
    *(ast.RShift, ast.BitAnd, ast.BitOr, ast.BitXor),
)
GROWING_OPERATORS = (ast.Pow, ast.LShift)
SIGNS = (ast.USub, ast.UAdd, ast.Invert)
LITERAL_NODES = (
    *(ast.Expression, ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.Load),
    *(ast.UnaryOp, ast.BinOp, *SIGNS, *OPERATORS, *GROWING_OPERATORS),
)
NUMBER_TEXT = re.compile(r"[-+]?[\d_]*\.?[\d_]*(?:[eE][-+]?\d{1,4})?(?:/\d+)?")


def check_text(source: str | bytes, grammar: Grammar) -> None:
    """Accept the source of an expression.

    Raises:
        RefusedTextError: It is too long, or no expression of the grammar.
    """
    if len(source) > MAX_CHARACTERS:
        raise RefusedTextError(
            f"the text has {len(source)} characters; at most {MAX_CHARACTERS} are evaluated"
        )
    text = source.decode(errors="replace") if isinstance(source, bytes) else source
    try:
        tree = ast.parse(text.strip(" \t\n"), mode="eval")
    except (ValueError, RecursionError, MemoryError) as error:
        raise RefusedTextError(f"the text is not {grammar.value}: {error}") from None
    check_tree(tree, grammar)


def check_tree(tree: ast.AST, grammar: Grammar) -> None:
    """Accept a parsed expression.

    Raises:
        RefusedTextError: As `check_text`.
    """
    for count, (node, depth) in enumerate(_walk(tree)):
        if count > MAX_NODES or depth > MAX_DEPTH:
            raise RefusedTextError(
                f"the text has more than {MAX_NODES} parts or {MAX_DEPTH} levels"
            )
        if grammar is Grammar.LITERAL and not isinstance(node, LITERAL_NODES):
            raise _refuse(node, grammar)
    if grammar is Grammar.ARITHMETIC:
        _num_bits(tree)
        return
    for node, _ in _walk(tree):
        if isinstance(node, ast.BinOp | ast.UnaryOp):  # of numbers alone: others repeat a list
            _num_bits(node)


def _walk(tree: ast.AST) -> Iterator[tuple[ast.AST, int]]:
    """Yield each node with its depth, without recursion."""
    waiting = [(tree, 0)]
    while waiting:
        node, depth = waiting.pop()
        yield node, depth
        waiting.extend((child, depth + 1) for child in ast.iter_child_nodes(node))


def _num_bits(node: ast.AST) -> float | None:
    """Accept arithmetic; return at least the bits of its value, None if it has symbols.

    Raises:
        RefusedTextError: It is no arithmetic, or a number in it has too many bits.
    """
    bits = _num_bits_of_parts(node)
    if bits is not None and bits > MAX_BITS:
        raise RefusedTextError(f"the text holds a number of more than {MAX_BITS:g} bits")
    return bits


def _num_bits_of_parts(node: ast.AST) -> float | None:
    match node:
        case ast.Expression(body=part):
            return _num_bits(part)
        case ast.UnaryOp(op=operator, operand=part) if isinstance(operator, SIGNS):
            return _num_bits(part)
        case ast.Constant(value=int() | float() | complex() as number):
            return float(number.bit_length()) if isinstance(number, int) else 64.0
        case ast.Name(id=name) if not name.startswith("_"):
            return None
        case ast.BinOp(left=base, op=operator, right=exponent) if isinstance(
            operator, GROWING_OPERATORS
        ):
            return _grow(_num_bits(base), _num_bits(exponent))
        case ast.BinOp(left=left, op=operator, right=right) if isinstance(operator, OPERATORS):
            return _add([_num_bits(left), _num_bits(right)])
        case ast.Call(func=ast.Name(id=name), args=parts, keywords=[]) if name in MAKERS:
            return _num_bits_of_maker(name, parts)
        case ast.Call(func=ast.Name(id=name), args=parts, keywords=[]) if name in FUNCTIONS:
            bits = [_num_bits(part) for part in parts]
            return _grow(bits[0], _add(bits)) if name in GROWING and bits else _add(bits)
    raise _refuse(node, Grammar.ARITHMETIC)


def _num_bits_of_maker(name: str, parts: list[ast.expr]) -> float | None:
    """Accept a number or a symbol as sympy's parser writes it."""
    match parts:
        case [ast.Constant(value=str() as text)] if name == "Symbol" and text.isidentifier():
            return None
        case [ast.Constant(value=str() as text)] if name != "Symbol" and NUMBER_TEXT.fullmatch(
            text
        ):
            return 4.0 * len(text)
        case [_] | [_, _] if name == "Rational" or (len(parts) == 1 and name != "Symbol"):
            return _add([_num_bits(part) for part in parts])
    raise RefusedTextError(f"the text calls {name} with something else than a number or a name")


def _add(bits: list[float | None]) -> float | None:
    """Return the bits of a product, which has at least as many bits as a sum."""
    known_bits = [part for part in bits if part is not None]
    return sum(known_bits) + 1 if len(known_bits) == len(bits) else None


def _grow(base: float | None, exponent: float | None) -> float | None:
    """Return the bits of a power."""
    if exponent is None:
        return None
    if base is None:
        if exponent > MAX_EXPONENT_BITS:
            raise RefusedTextError(
                f"the text holds a power of more than {MAX_EXPONENT_BITS:g} bits"
            )
        return None
    return max(base, 1.0) * 2.0**exponent if exponent < MAX_EXPONENT_BITS * 2 else inf


def _refuse(node: ast.AST, grammar: Grammar) -> RefusedTextError:
    return RefusedTextError(
        f"the text has {type(node).__name__}, and only {grammar.value} is evaluated"
    )
