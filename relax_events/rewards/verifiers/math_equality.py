"""Whether two answers are the same in mathematics: as text, as numbers, or to a computer algebra system."""

from __future__ import annotations

import logging
import re
from fractions import Fraction
from functools import lru_cache
from typing import Any

from relax_events.errors import EnvironmentProblem, RewardError
from relax_events.rewards.verifiers.answers import MAX_ANSWER_CHARACTERS

MAX_DEPTH = 30
MAX_BITS = 10_000_000
NOISE = re.compile(r"\\(?:left|right|displaystyle|quad|qquad)(?![a-zA-Z])|\\[!,;:> $]|[$\s~]")
DEGREES = re.compile(r"\^(?:\{\\circ\}|\\circ)|\\degree")
FRACTION = re.compile(r"\\[dtc]?frac")
SHORT_FRACTION = re.compile(r"\\frac(\d)(\d)")
WRAPPED = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox)\{([^{}]*)\}")
THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
PLAIN_NUMBER = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)")
PLAIN_FRACTION = re.compile(r"([-+]?)(?:\\frac\{([-+]?\d+)\}\{([-+]?\d+)\}|(\d+)/(\d+))")
GROUPED = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")


def are_equal(given: str, wanted: str) -> bool:
    """Tell whether an answer equals the reference, both in LaTeX or plain text.

    Most answers are decided as text or as rational numbers, within microseconds; the others by math-verify, whose rules hold then:
    sets, intervals, matrices, equations, and decimals that agree to six digits.

    Raises:
        RewardError: The answer is too long, nested too deeply, or holds too large a number to be compared: nobody knows if it is right.
    """
    mine, other = tidy(given), tidy(wanted)
    if not mine or not other:
        return False
    if mine == other:
        return True
    _require_decidable(mine)
    numbers = plain_number(mine), plain_number(other)
    if numbers[0] is not None and numbers[1] is not None and (numbers[0] == numbers[1] or "." not in mine + other):
        return numbers[0] == numbers[1]
    return _are_equal_expressions(given, wanted)


@lru_cache(maxsize=4096)
def tidy(text: str) -> str:
    r"""Return an answer without what does not matter: spaces, `$`, `\left`, sizes of fractions, text commands, degrees, a full stop."""
    text = DEGREES.sub("", NOISE.sub("", text[: MAX_ANSWER_CHARACTERS + 1]))
    text = SHORT_FRACTION.sub(r"\\frac{\1}{\2}", FRACTION.sub(r"\\frac", text))
    text = WRAPPED.sub(r"\1", text).rstrip(".")
    if GROUPED.fullmatch(text):
        text = THOUSANDS.sub("", text)
    return text.removeprefix("+")


def plain_number(text: str) -> Fraction | None:
    """Return the value of an integer, a decimal or a fraction of integers; None for everything else."""
    if PLAIN_NUMBER.fullmatch(text):
        return Fraction(text)
    if (found := PLAIN_FRACTION.fullmatch(text)) is None:
        return None
    sign, above, below, plain_above, plain_below = found.groups()
    if int(below or plain_below) == 0:
        return None
    return Fraction(int(above or plain_above), int(below or plain_below)) * (-1 if sign == "-" else 1)


def import_math_verify() -> Any:
    """Import math-verify, which takes seconds.

    Raises:
        EnvironmentProblem: It is not installed.
    """
    try:
        import math_verify
    except ImportError as error:
        raise EnvironmentProblem(f"this reward needs the package math-verify ({error}); install relax-events[rewards]") from None
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # It warns that we keep the time limit, which we do, by killing.
    return math_verify


def warm_up() -> None:
    """Import math-verify and let it build its grammar's tables, so that the first samples do not pay for it."""
    import_math_verify()
    _are_equal_expressions(r"\frac{x^{2}+1}{\sqrt{2}}", r"\left(1, \pi\right]")


@lru_cache(maxsize=4096)  # the samples of a prompt group give the same few answers
def _are_equal_expressions(given: str, wanted: str) -> bool:
    found, reference = _parsed(given), _parsed(wanted)
    return bool(import_math_verify().verify(list(reference), list(found), timeout_seconds=None, raise_on_error=True))


@lru_cache(maxsize=1024)
def _parsed(text: str) -> tuple[Any, ...]:
    package = import_math_verify()
    config = (package.LatexExtractionConfig(boxed_match_priority=0),)
    parsed = tuple(package.parse(rf"\boxed{{{text}}}", config, parsing_timeout=None, raise_on_error=True))
    for expression in parsed:
        _num_bits(expression)
    return parsed


def _require_decidable(text: str) -> None:
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
    """Return about how many bits the numbers of an expression have before they are worked out.

    Raises:
        RewardError: More than any answer has. Python works out a power of powers in one go, for hours, and cannot be interrupted.
    """
    parts = getattr(expression, "args", ())
    below = [_num_bits(part) for part in parts]
    name = type(expression).__name__
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
