"""JSON text keeps integers, refuses NaN, and names what it can't read or write."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import pytest

from relax_events.events.json_text import TOO_DEEP, WrittenFloat, format_json, parse_json

LIMITS = [2**53, 10**18 - 1, 10**18, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**19, 10**40]


@pytest.mark.parametrize("integer", [sign * limit for limit in LIMITS for sign in (1, -1)])
@pytest.mark.parametrize("around", ["{}", "[{}]", '{{"a":{},"b":null}}', '{{"é":[0.5,{}]}}'])
def test_integers_next_to_limits_of_orjson_are_exact(integer: int, around: str) -> None:
    text = around.format(integer)
    assert parse_json(text) == json.loads(text)
    assert repr(parse_json(text)) == repr(json.loads(text))
    assert format_json(parse_json(text)) == text


@pytest.mark.parametrize(
    "number",
    ["-0", "-0.0", "1e400", "1E5", "5e-324", "0.1234567890123456789", "1" * 30 + ".5", "1" * 18],
)
def test_numbers_are_read_as_python_reads_them(number: str) -> None:
    assert repr(parse_json(f"[{number}]")) == repr(json.loads(f"[{number}]"))


@dataclass
class Pair:
    """orjson writes a dataclass by itself."""

    first: float | None


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, WrittenFloat("1e999")])
@pytest.mark.parametrize("is_alone", [True, False])
def test_number_outside_of_json_is_refused_at_any_depth(number: float, is_alone: bool) -> None:
    values: list[Any] = [number, [None, number], {"a": [{"b": number}, None]}, ("null", [number])]
    for value in values if is_alone else [[None, "null", value] for value in values]:
        with pytest.raises(ValueError, match="not JSON compliant"):
            format_json(value, default=float)
    with pytest.raises(TypeError):
        format_json([Pair(number)])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        ([None, 0.5, "null"], '[null,0.5,"null"]'),
        ({"a": None, "b": [{"c": None}]}, '{"a":null,"b":[{"c":null}]}'),
        ((None, 1), "[null,1]"),
        ({1: None, 2: 2**70}, '{"1":null,"2":1180591620717411303424}'),
        ([WrittenFloat("3.10"), None], "[3.1,null]"),
    ],
)
def test_null_and_keys_are_written(value: Any, text: str) -> None:
    assert format_json(value, default=float) == text


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "Expecting value"),
        ("[NaN]", "NaN is no number of JSON"),
        ("[-Infinity, 12345678901234567890]", "-Infinity is no number of JSON"),
        ("[" * 100_000, TOO_DEEP),
        ("[" * 2000 + "]" * 2000, TOO_DEEP),
        ("9" * 5000, "an integer has more than 4,300 digits; write a string"),
        ('"\\ud800"', "surrogates not allowed"),
        ('["\\ud800", 12345678901234567890]', "surrogates not allowed"),
        ("[1, 2", "Expecting"),
    ],
)
def test_text_that_is_refused_has_an_error_of_its_own(text: str, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        parse_json(text)


def test_depth_is_limited_in_text_that_is_written() -> None:
    for depth, is_written in ((254, True), (256, False), (900, False)):
        value = parse_json("[" * depth + "]" * depth)
        if is_written:
            assert format_json(value) == "[" * depth + "]" * depth
        else:
            with pytest.raises(ValueError, match=TOO_DEEP):
                format_json(value)
