"""Write the values of a row as the texts that a prompt group holds: label, metadata and tools.

Nothing is changed: what has no form in JSON, or does not fit into a record, is refused by its name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from relax_events.data.messages import list_texts
from relax_events.data.rows import PromptRow
from relax_events.errors import ConfigError
from relax_events.events.json_text import WrittenFloat, format_json, parse_json
from relax_events.topics.plan import MAX_RECORD_BYTES

MAX_ROW_BYTES = MAX_RECORD_BYTES * 3 // 4
"""Of a row's texts. The records of its samples repeat them, with completion and tokens."""
JSON_TYPE_NAMES = {
    type(None): "null",
    dict: "an object",
    list: "a list",
    str: "a string",
    int: "a number",
    float: "a number",
    WrittenFloat: "a number",
    bool: "a boolean",
}


def write_label(value: Any, location: str) -> str:
    """Return a label as text: a number as the file has it, a time without quotes, null as no
    reference.

    Raises:
        ConfigError: It can't be written; the text names the location.
    """
    if value is None:
        return ""
    if isinstance(value, str | WrittenFloat):
        return str(value)
    text = write_value(value, location)
    return parse_json(text) if text.startswith('"') else text


def write_object(fields: Mapping[str, Any], location: str, *, takes_nan: bool) -> str:
    """Return a JSON object; errors as `write_value`.

    Args:
        fields: Its fields.
        location: Of the row, for errors.
        takes_nan: Whether NaN and infinite numbers become null.
    """
    try:
        return format_json(fields, default=_write_part)
    except (TypeError, ValueError):  # a part has to be named or replaced
        pass
    parts = (
        f"{format_json(key)}:{write_value(value, f'{location}: {key}', takes_nan=takes_nan)}"
        for key, value in fields.items()
    )
    return f"{{{','.join(parts)}}}"


def write_value(value: Any, location: str, *, takes_nan: bool = False) -> str:
    """Return a value as JSON text.

    Raises:
        ConfigError: It can't be written; the text names the location.
    """

    def replace_number(number: float) -> None:
        if not takes_nan:
            raise ConfigError(
                f"{location} holds {_name_number(number)}, which is no number of JSON; write null"
            )

    def name_part(part: Any) -> Any:
        try:
            return _write_part(part)
        except TypeError:
            raise ConfigError(
                f"{location} holds a {type(part).__name__}, which JSON can't represent; set "
                "metadata_keys to the columns to keep"
            ) from None

    try:
        return format_json(value, default=_write_part)
    except (TypeError, ValueError):
        pass
    try:
        return format_json(_replace_numbers(value, replace_number), default=name_part)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{location} can't be written as JSON: {error}") from None


def _write_part(part: Any) -> Any:
    """Return a number as written or a time in a form that JSON has.

    Raises:
        TypeError: It is neither.
    """
    return float(part) if isinstance(part, WrittenFloat) else orjson.loads(orjson.dumps(part))


def _replace_numbers(value: Any, replace: Callable[[float], None]) -> Any:
    """Return a value with other values for NaN and infinite numbers."""
    if isinstance(value, float) and not math.isfinite(value):
        return replace(value)
    if isinstance(value, dict):
        return {key: _replace_numbers(part, replace) for key, part in value.items()}
    if isinstance(value, list):
        return [_replace_numbers(part, replace) for part in value]
    return value


def _name_number(number: float) -> str:
    return number.text if isinstance(number, WrittenFloat) else json.dumps(number)


def write_tools(tools: Any, location: str) -> str:
    """Return a row's tools as a JSON list, or an empty string if it has none.

    Raises:
        ConfigError: They are no list of objects; the text names the location.
    """
    if isinstance(tools, str) and tools:
        try:
            tools = parse_json(tools)
        except ValueError as error:
            raise ConfigError(
                f"{location} is not JSON: {error}; tools are a list of objects, or its JSON text"
            ) from None
    if not tools:
        return ""
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ConfigError(
            f"{location} is {describe_type(tools)}; tools are a list of objects, or its JSON text"
        )
    return write_value(tools, location)


def describe_type(value: Any) -> str:
    """Return the name that JSON has for a value's type."""
    if value in ("", []):
        return f"an empty {JSON_TYPE_NAMES[type(value)].split()[-1]}"
    return JSON_TYPE_NAMES.get(type(value), f"a {type(value).__name__}")


def require_record(row: PromptRow, columns: Mapping[str, Any], location: str) -> PromptRow:
    """Return a row whose texts fit into a record.

    Args:
        row: The row.
        columns: Its values in the file, for errors.
        location: File and line, for errors.
    Raises:
        ConfigError: It has half of a surrogate pair, or is too large; the text names the column.
    """
    messages = [*row.messages, *(message for one in row.completions for message in one)]
    texts = (row.answer, row.metadata, row.tools, *list_texts(messages))
    try:
        num_bytes = sum(len(text) if text.isascii() else len(text.encode()) for text in texts)
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        key = next(key for key, value in columns.items() if half in _print_column(key, value))
        raise ConfigError(
            f"{location}: {_spell(key)} holds {_spell(half)} alone, which is half of a character; "
            "replace it"
        ) from None
    if num_bytes > MAX_ROW_BYTES:
        sizes = {key: len(_print_column(key, value)) for key, value in columns.items()}
        key = max(sizes, key=lambda key: sizes[key])
        raise ConfigError(
            f"{location} has {num_bytes} bytes of text, at most {MAX_ROW_BYTES} fit into a record; "
            f"shorten {key}, which has {sizes[key]} characters, or leave it out of metadata_keys"
        )
    return row


def _print_column(key: str, value: Any) -> str:
    return json.dumps([key, value], ensure_ascii=False, default=str)


def _spell(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()
