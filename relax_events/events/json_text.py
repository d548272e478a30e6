"""The JSON text that events hold: metadata, tools, and arguments of tool calls.

Integers keep all their digits: orjson reads those from 2^64 on as floats, and does not write them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import orjson

MAX_LEVELS = 254
"""Of nested objects and lists, as many as orjson writes."""
TOO_DEEP = "it is nested too deep"


class WrittenFloat(float):
    """A number that keeps the text in which a file has it."""

    text: str

    def __new__(cls, text: str) -> WrittenFloat:
        """Read the text of a number."""
        number = super().__new__(cls, text)
        number.text = text
        return number

    def __str__(self) -> str:
        """Return the text in the file."""
        return self.text


def parse_json(text: str) -> Any:
    """Parse JSON, with integers of any size.

    Raises:
        ValueError: It is none, is nested too deep, or has an integer of more than 4,300 digits.
    """
    value = decode_json(text, parse_constant=_refuse_constant)
    if "\\u" in text:
        format_json(value).encode()  # refuses a lone surrogate
    return value


def decode_json(text: str, **hooks: Any) -> Any:
    """Parse JSON as `parse_json`, but take NaN, infinity and lone surrogates."""
    with _named_errors():
        return json.loads(text, **hooks)


def decode_begin(text: str, start: int, *, decoder: json.JSONDecoder) -> tuple[Any, int]:
    """Parse the JSON that begins at a character; return it, and where it ends.

    Raises:
        ValueError: As `decode_json`.
    """
    with _named_errors():
        return decoder.raw_decode(text, start)


@contextmanager
def _named_errors() -> Iterator[None]:
    try:
        yield
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    except ValueError as error:
        if "integer string conversion" in str(error):  # its time grows with the square of the size
            raise ValueError("an integer has more than 4,300 digits; write a string") from None
        raise


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def format_json(value: Any, *, default: Callable[[Any], Any] | None = None) -> str:
    """Return a value as JSON text.

    Args:
        value: The value.
        default: Converts parts that JSON can't represent.
    Raises:
        TypeError: A part can't be represented.
        ValueError: A part is NaN or infinite, or it is nested too deep.
    """
    try:
        text = orjson.dumps(value, default=default, option=orjson.OPT_NON_STR_KEYS).decode()
        if "null" not in text:  # as orjson writes NaN
            return text
    except TypeError:  # a large integer, a number as written, or a part without a form in JSON
        pass
    try:
        text = json.dumps(
            value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=default
        )
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    if text.count("[") + text.count("{") > MAX_LEVELS:
        _require_depth(value)
    return text


def _require_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_LEVELS + 1):
        level = [
            part
            for one in level
            if isinstance(one, dict | list | tuple)
            for part in (one.values() if isinstance(one, dict) else one)
        ]
        if not level:
            return
    raise ValueError(TOO_DEEP)
