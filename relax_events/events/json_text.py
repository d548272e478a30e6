"""The JSON text that events hold: metadata, tools, and arguments of tool calls.

Integers keep all their digits: orjson reads those from 2^64 on as floats, and does not write them.
It is used where a text has no 19 digits in a row, and where a value has no such integer (ADR 73).
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NoReturn

import orjson

MAX_LEVELS = 254
"""Of nested objects and lists, as many as orjson writes."""
TOO_DEEP = "it is nested too deep"
TO_ZEROS = bytes.maketrans(b"123456789", b"000000000")
LARGE_INTEGER = b"0" * 19
"""The digits of every integer that orjson does not read exactly, as zeros."""
PLAIN_TYPES = frozenset({str, int, bool, type(None)})


class RepeatedKey(ValueError):
    """An object has a key twice."""


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
    try:
        content = text.encode()
        if LARGE_INTEGER not in content.translate(TO_ZEROS):
            return orjson.loads(content)
    except ValueError:  # Python's decoder names what is wrong
        pass
    value = decode_json(text, parse_constant=refuse_constant)
    if "\\u" in text:
        format_json(value).encode()  # refuses a lone surrogate
    return value


def decode_json(text: str, **hooks: Any) -> Any:
    """Parse JSON as `parse_json`, but take NaN, infinity and lone surrogates."""
    with _named_errors():
        return _build_decoder(**hooks).decode(text)


def decode_begin(text: str, start: int, *, decoder: json.JSONDecoder) -> tuple[Any, int]:
    """Parse the JSON that begins at a character; return it, and where it ends.

    Raises:
        ValueError: As `decode_json`.
    """
    with _named_errors():
        return decoder.raw_decode(text, start)


def build_object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON, as the hook of a decoder for objects.

    Raises:
        RepeatedKey: It has a key twice.
    """
    value = dict(pairs)
    if len(value) < len(pairs):
        names = Counter(name for name, _ in pairs)
        raise RepeatedKey(f"key {names.most_common(1)[0][0]!r} occurs twice")
    return value


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


@cache
def _build_decoder(**hooks: Any) -> json.JSONDecoder:
    return json.JSONDecoder(**hooks)


def refuse_constant(name: str) -> NoReturn:
    """Refuse NaN and infinity, as the hook of a decoder for constants.

    Raises:
        ValueError: Always.
    """
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
        content = orjson.dumps(value, default=default)
        if b"null" not in content or _is_finite([value]):  # orjson writes NaN as null
            return content.decode()
    except TypeError:  # a large integer, a key that is no text, or a part without a form in JSON
        pass
    try:
        text = json.dumps(
            value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=default
        )
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    if text.count("[") + text.count("{") > MAX_LEVELS:
        require_depth(value)
    return text


def _is_finite(value: Any) -> bool:
    """Return whether an object or list has no NaN, no infinity and no part of another type."""
    for part in value.values() if type(value) is dict else value:
        kind = type(part)
        if kind is dict or kind is list:
            if not _is_finite(part):
                return False
        elif kind not in PLAIN_TYPES and not (isinstance(part, float) and math.isfinite(part)):
            return False
    return True


def require_depth(value: Any, *, max_levels: int = MAX_LEVELS) -> None:
    """Refuse a value with more objects and lists in each other.

    Raises:
        ValueError: It has.
    """
    level = [value]
    for _ in range(max_levels + 1):
        level = [
            part
            for one in level
            if isinstance(one, dict | list | tuple)
            for part in (one.values() if isinstance(one, dict) else one)
        ]
        if not level:
            return
    raise ValueError(TOO_DEEP)
