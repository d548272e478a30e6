"""Outputs of programs, compared with an independent statement of the rule in exact fractions."""

from __future__ import annotations

import json
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_events.packages.verifiers.code import RESULT_COMPARISON, is_same_output

pytestmark = pytest.mark.property
DIGITS = st.text("0123456789", min_size=1, max_size=40)
INTEGERS = st.builds(str, st.integers(-(10**60), 10**60))
FLOATS = st.builds(
    "{}{}.{}{}".format,
    st.sampled_from(["", "-"]),
    DIGITS,
    DIGITS,
    st.sampled_from(["", "e0", "e-3", "E+12", "e30"]),
)
NUMBERS = INTEGERS | FLOATS
SHIFTS = st.sampled_from(["0", "1e-9", "9e-7", "1.1e-6", "1e-3", "0.5", "-9e-7", "-1.1e-6"])
FRAMES = st.sampled_from(["{}", "[{}]", "[1, {}, x]", "({},{})", "a={}", "Case #1: {}", "{}%"])


def is_right(number: str, expected: str) -> bool:
    """State the rule by fractions, whose arithmetic has no error."""
    value, right = Fraction(number), Fraction(expected)
    has_integer = not set(expected) & set(".eE")
    if has_integer and not set(number) & set(".eE"):
        return number == expected
    difference = abs(value - right)
    limit = Fraction(1, 10**6)
    return difference <= limit or (not has_integer and difference <= limit * abs(right))


def write(value: Fraction) -> str:
    """Write a value exactly; its denominator divides a power of ten."""
    digits = 80
    scaled = value * 10**digits
    assert scaled.denominator == 1
    sign, whole = "-" if scaled < 0 else "", str(abs(scaled.numerator)).rjust(digits + 1, "0")
    return f"{sign}{whole[:-digits]}.{whole[-digits:]}"


@given(NUMBERS, NUMBERS, FRAMES)
def test_two_numbers_are_compared_as_fractions_are(one: str, other: str, frame: str) -> None:
    expected = is_right(one, other)
    assert is_same_output(frame.format(one, one), frame.format(other, other)) == expected


@given(NUMBERS, SHIFTS, st.booleans(), FRAMES)
def test_a_number_near_another_is_right_within_the_tolerance(
    expected: str, shift: str, is_relative: bool, frame: str
) -> None:
    scale = abs(Fraction(expected)) if is_relative else Fraction(1)
    number = write(Fraction(expected) + Fraction(shift) * scale)
    assert is_same_output(frame.format(number, number), frame.format(expected, expected)) == (
        is_right(number, expected)
    )


@given(NUMBERS, FRAMES)
def test_a_number_is_right_for_itself(number: str, frame: str) -> None:
    text = frame.format(number, number)
    assert is_same_output(f"{text}  \n\n", text)


@pytest.mark.parametrize(
    ("printed", "expected", "is_same"),
    [
        ("0.333333", "0.333333333333", True),
        ("0.34", "0.333333333333", False),
        ("[0.333333, 2]", "[0.333333333333, 2]", True),
        ("[0.333333,2]", "[0.333333333333,2]", True),
        ("[0.333333, 3]", "[0.333333333333, 2]", False),
        ("(1.0, 2.5)", "(1.00000001, 2.5)", True),
        ("1 2.0 x", "1 2 x", True),
        ("2 2.5 x", "2 2.5 y", False),
        ("1000000007", "1000000008", False),
        ("1000000007.5", "1000000008", False),
        ("1" * 5000, "1" * 5000, True),
        ("1" * 5000 + "2", "1" * 5000 + "3", False),
        ("1" * 5000 + ".0", "1" * 5000, True),
        ("1" * 5000 + ".5", "1" * 5000, False),
        ("0." + "3" * 5000, "0.333333333", True),
        ("1e400", "1.0000001e400", True),
        ("1e400", "1.1e400", False),
        ("1e99999999999999999999", "2e99999999999999999999", False),
        ("007", "7", False),
        ("0110", "110", False),
        ("-0.0", "0", True),
        ("1.2.3", "1.2.30", False),
        ("v1.5", "v1.50", False),
        ("2024-01-02", "2024-01-2", False),
        ("10:30", "10:31", False),
        ("nan", "0", False),
        ("inf", "1e999", False),
        ("YES", "Yes", False),
        ("1\n2", "1 2", False),
        ("1,000", "1000", False),
        ("0.5%", "0.50%", True),
        ("1e-7", "0", True),
        ("\u0661.5", "1.5", False),
        ("is 0.333333.", "is 0.33333333333.", True),
        ("[1. 2.5]", "[1.0 2.5]", True),
        ("", "0", False),
    ],
)
def test_tokens_are_compared_by_their_kind(printed: str, expected: str, is_same: bool) -> None:
    assert is_same_output(printed, expected) == is_same


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(-1e12, 1e12) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=6,
)


def are_close(result: Any, expected: Any) -> bool:
    """Compare by the statements that a test of a function's result runs."""
    names: dict[str, Any] = {}
    exec(RESULT_COMPARISON, names)
    return bool(names["are_close"](json.loads(json.dumps(result)), expected))


@given(VALUES, st.sampled_from([1e-9, -1e-9]))
def test_a_result_is_right_for_itself_and_in_lists_within_the_tolerance(
    value: Any, shift: float
) -> None:
    def move(part: Any) -> Any:
        if isinstance(part, list):
            return [move(one) for one in part]
        if isinstance(part, dict):
            return {key: move(one) for key, one in part.items()}
        return part * (1 + shift) if isinstance(part, float) else part

    assert are_close(value, value)
    assert are_close(move(value), value)
    assert not are_close([value], value)


@pytest.mark.parametrize(
    ("result", "expected", "is_close"),
    [
        ([0.333333, [2]], [1 / 3, [2]], True),
        ({"a": 0.333333}, {"a": 1 / 3}, True),
        ([0.34], [1 / 3], False),
        ([1], [1, 2], False),
        (2**70, 2**70 + 1, False),
        (2**70, 2**70, True),
        (3.0, 3, True),
        (3.1, 3, False),
        (1000000007.5, 1000000008, False),
        ("0.333333", "0.333333333", False),
        ({"a": 1}, {"b": 1}, False),
        (None, 0.0, False),
    ],
)
def test_results_are_compared_as_json_with_a_tolerance(
    result: Any, expected: Any, is_close: bool
) -> None:
    assert are_close(result, expected) == is_close
