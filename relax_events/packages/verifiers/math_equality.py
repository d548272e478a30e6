"""Compare two mathematical answers: as text, as numbers, or by a computer algebra system."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from fractions import Fraction
from functools import lru_cache
from typing import Any

from relax_events.api.rewards import EnvironmentProblem, RewardError
from relax_events.packages.verifiers.answer_extraction import MAX_ANSWER_CHARACTERS
from relax_events.packages.verifiers.math_plain_syntax import plain_expression

MAX_DEPTH = 30
MAX_BITS = 10_000_000
MAX_EXPONENT = 1000
"""Of a power of a sum with symbols, which sympy writes out to compare it."""
NO_SPACE = re.compile(r"\\!\s*")
LISTED = re.compile(r",\s")
NOISE = re.compile(r"\\(?:left|right|displaystyle|quad|qquad)(?![a-zA-Z])|\\[!,;:> $]|[$\s~]")
DEGREES = re.compile(r"\^(?:\{\\circ\}|\\circ)|\\degree")
FRACTION = re.compile(r"\\[dtc]?frac")
SHORT_FRACTION = re.compile(r"\\frac(\d)(\d)")
WRAPPED = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox)\{([^{}]*)\}")
UPRIGHT_LETTER = re.compile(r"\\mathrm\{([a-zA-Z])\}")
THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
DECIMAL_COMMA = re.compile(r"([-+]?\d+),(\d+)")
PLAIN_NUMBER = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d{1,3})?")
PLAIN_FRACTION = re.compile(r"([-+]?)(?:\\frac\{([-+]?\d+)\}\{([-+]?\d+)\}|(\d+)/(\d+))")
GROUPED = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")


def are_equal(answer: str, reference: str) -> bool:
    """Return whether an answer equals the reference; both in LaTeX, program syntax, or words.

    Most answers are compared as text or as rational numbers, within microseconds; the others by
    math-verify, with its rules: sets, intervals, matrices, equations, and decimals that agree to
    six digits.

    Raises:
        RewardError: The answer is too long, too deeply nested, or has too large a number to
            compare.
    """
    mine, other = normalize(answer), normalize(reference)
    if not mine or not other:
        return False
    if mine == other:
        return True
    check_comparable(mine)
    if (same := _are_equal_numbers(mine, other)) is not None:
        return same
    return _are_equal_expressions(answer, reference)


def _are_equal_numbers(mine: str, other: str) -> bool | None:
    if (DECIMAL_COMMA.fullmatch(mine) is None) != (DECIMAL_COMMA.fullmatch(other) is None):
        mine, other = DECIMAL_COMMA.sub(r"\1.\2", mine), DECIMAL_COMMA.sub(r"\1.\2", other)
    numbers = plain_number(mine), plain_number(other)
    if (
        numbers[0] is None
        or numbers[1] is None
        or (numbers[0] != numbers[1] and "." in mine + other)
    ):
        return None
    return numbers[0] == numbers[1]


@lru_cache(maxsize=4096)
def normalize(text: str) -> str:
    r"""Normalize an answer: remove spaces, `$`, `\left`, sizes of fractions,
    text commands, degrees, a full stop.
    """
    text = NO_SPACE.sub("", text[: MAX_ANSWER_CHARACTERS + 1]).replace("{,}", ",")
    is_list = LISTED.search(text) is not None
    text = DEGREES.sub("", NOISE.sub("", text))
    text = SHORT_FRACTION.sub(r"\\frac{\1}{\2}", FRACTION.sub(r"\\frac", text))
    text = WRAPPED.sub(r"\1", text).rstrip(".")
    if not is_list and GROUPED.fullmatch(text):
        text = THOUSANDS.sub("", text)
    return text.removeprefix("+")


def plain_number(text: str) -> Fraction | None:
    """Return the value of an integer, a decimal or a fraction of integers; None for other texts."""
    if PLAIN_NUMBER.fullmatch(text):
        return Fraction(text)
    if (match := PLAIN_FRACTION.fullmatch(text)) is None:
        return None
    sign, above, below, plain_above, plain_below = match.groups()
    if int(below or plain_below) == 0:
        return None
    return Fraction(int(above or plain_above), int(below or plain_below)) * (
        -1 if sign == "-" else 1
    )


def import_math_verify() -> Any:
    """Import math-verify, which takes seconds.

    Raises:
        EnvironmentProblem: It is not installed.
    """
    try:
        import math_verify
    except ImportError as error:
        raise EnvironmentProblem(
            f"this reward needs the package math-verify ({error}); install relax-events[rewards]"
        ) from None
    logging.getLogger("math_verify").setLevel(
        logging.ERROR
    )  # It warns that the caller must enforce the time limit, which the pool does by killing.
    return math_verify


def warm_up() -> None:
    """Import math-verify and build its grammar tables, so that the first samples are not slow."""
    import_math_verify()
    _are_equal_expressions(r"\frac{x^{2}+1}{\sqrt{2}}", r"\left(1, \pi\right]")


def equals_parsed(parsed: tuple[Any, ...], reference: str) -> bool:
    """Return whether math-verify's result for a completion (an expression and its text) equals a
    reference.

    Raises:
        RewardError: As in `are_equal`.
    """
    texts = [normalize(part) for part in parsed if isinstance(part, str)]
    return any(_are_equal_numbers(part, normalize(reference)) for part in texts) or _verify(
        parse_expressions(reference), parsed
    )


@lru_cache(maxsize=4096)  # the samples of a prompt group give the same few answers
def _are_equal_expressions(answer: str, reference: str) -> bool:
    return _verify(parse_expressions(reference), parse_expressions(answer))


def _verify(reference: tuple[Any, ...], answer: tuple[Any, ...]) -> bool:
    package = import_math_verify()
    try:
        return bool(
            package.verify(list(reference), list(answer), timeout_seconds=None, raise_on_error=True)
        )
    except (MemoryError, RecursionError):
        raise
    # The boundary to math-verify and sympy, which raise if they cannot compare, such as `x < 2`
    # with `x \\neq 2`.
    except Exception:
        return not {part for part in reference if isinstance(part, str)}.isdisjoint(
            part for part in answer if isinstance(part, str)
        )


@lru_cache(maxsize=1024)
def parse_expressions(text: str) -> tuple[Any, ...]:
    """Parse an answer: its expression and its text.

    Raises:
        RewardError: As in `are_equal`.
    """
    check_comparable(text)  # of a reference too: a row is as foreign as a completion
    if (plain := plain_expression(text.strip("$ \n"))) is not None:
        return check_size((plain, text))
    package = import_math_verify()
    config = (package.LatexExtractionConfig(boxed_match_priority=0),)
    return check_size(
        package.parse(
            rf"\boxed{{{to_math_verify_latex(text)}}}",
            config,
            parsing_timeout=None,
            raise_on_error=True,
        )
    )


def to_math_verify_latex(text: str) -> str:
    r"""Replace LaTeX commands that math-verify's grammar lacks by commands that it has: `\bmod`,
    `\mathrm{e}`.
    """
    return UPRIGHT_LETTER.sub(r"\1", text.replace(r"\bmod", r"\mod"))


def check_size(expressions: Iterable[Any]) -> tuple[Any, ...]:
    """Check the size of the numbers in expressions, and return the expressions.

    Raises:
        RewardError: A number is too large to be evaluated.
    """
    kept = tuple(expressions)
    for expression in kept:
        _num_bits(expression)
    return kept


def check_comparable(text: str) -> None:
    """Raise a RewardError for an answer that is too long or nested too deeply to be compared."""
    if len(text) > MAX_ANSWER_CHARACTERS:
        raise RewardError(f"the answer is longer than {MAX_ANSWER_CHARACTERS} characters")
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    if deepest > MAX_DEPTH:
        # math-verify takes the error of its exhausted parser for an answer without mathematics.
        raise RewardError(f"the answer nests {deepest} brackets, at most {MAX_DEPTH} are compared")


def _num_bits(expression: Any) -> float:
    """Estimate the bits of the numbers in an expression without evaluating it.

    Raises:
        RewardError: More bits than any answer has. Python would evaluate a power of powers for
            hours without interruption.
    """
    parts: tuple[Any, ...] = getattr(expression, "args", ())
    below = [_num_bits(part) for part in parts]
    name = type(expression).__name__
    if name == "Pow" and type(parts[0]).__name__ == "Add" and parts[0].free_symbols:
        _check_exponent(parts[1])
    if getattr(expression, "is_Integer", False):
        bits = float(int(expression).bit_length())
    elif name == "Pow" and parts and not parts[1].free_symbols and not parts[0].free_symbols:
        bits = max(below[0], 1.0) * (2.0 ** min(below[1], 64.0) if below[1] else 1.0)
    elif name in ("factorial", "factorial2") and not expression.free_symbols:
        bits = 2.0 ** min(below[0], 64.0)
    else:
        bits = max(below, default=0.0)
    if bits > MAX_BITS:
        raise RewardError(f"the answer holds a number of more than {MAX_BITS} bits")
    return bits


def _check_exponent(exponent: Any) -> None:
    """Raise a RewardError for a power of a sum with more terms than any answer has."""
    if getattr(exponent, "is_Integer", False) and abs(int(exponent)) > MAX_EXPONENT:
        raise RewardError(
            f"the answer holds the power {exponent} of a sum, at most {MAX_EXPONENT} is compared"
        )
