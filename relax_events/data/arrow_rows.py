"""Turn rows of Arrow into the values that JSON lines have.

A struct of Arrow has every field of its type, null where a row has no such key. This padding is
removed, at any depth. Nulls stay that rows have themselves: of a column, of a field that the run
file names, of one that no row has with another value (its type is then null), and a default or
constant of a JSON schema that allows null.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from relax_events.errors import ConfigError
from relax_events.events.json_text import WrittenFloat

Convert = Callable[[Any], Any]
MAX_EXACT_INTEGER = 2**53
"""Below it a float has the value of the integer that it stands for."""


class ArrowRows:
    """Read rows of Arrow as JSON lines would have them."""

    def __init__(self, named: Collection[str]) -> None:
        """Name the fields whose nulls are kept.

        Args:
            named: Columns, and fields with dots, as a run file names them.
        """
        self._named = named
        self._converts: tuple[pa.Schema, list[tuple[str, Convert]]] = (pa.schema([]), [])
        """The schema of the last table, and the conversions of its columns."""

    def read(self, table: pa.Table | pa.RecordBatch, *, path: Path) -> Iterator[Any]:
        """Yield the rows of a table.

        Args:
            table: The rows.
            path: Of its file, for errors.
        Raises:
            ConfigError: A value has no form in Python; the text names its column.
        """
        schema, converts = self._converts
        if table.schema != schema:
            columns = [
                (one.name, _build_column(one.type, one.name, self._named)) for one in table.schema
            ]
            converts = [(name, convert) for name, convert in columns if convert is not None]
            self._converts = table.schema, converts
        for row in _list_rows(table, path):
            for name, convert in converts:
                row[name] = convert(row[name])
            yield row


def _list_rows(table: pa.Table | pa.RecordBatch, path: Path) -> list[Any]:
    """Return the rows of a table as Python has them."""
    columns: dict[str, list[Any]] = {}
    for name, column in zip(table.schema.names, table.columns, strict=True):
        if name in columns:
            raise ConfigError(f"{path} has two columns {name}; rename one")
        try:
            columns[name] = column.to_pylist()
        except (ValueError, OverflowError) as error:
            raise ConfigError(
                f"{path}: column {name} of type {column.type} can't be read: {error}; write texts, "
                "or leave it out of metadata_keys"
            ) from None
    if not columns:
        return [{} for _ in range(table.num_rows)]
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _build_column(kind: pa.DataType, path: str, named: Collection[str]) -> Convert | None:
    """Build the conversion of a column: pandas writes integers next to nulls as floats."""
    if not pa.types.is_floating(kind):
        return _build(kind, path, named)
    shorten = _build(kind, path, named) or _keep
    return lambda value: _read_float(shorten(value))


def _build(kind: pa.DataType, path: str, named: Collection[str]) -> Convert | None:
    """Build the conversion of a type's values; None where they stay as they are."""
    if pa.types.is_dictionary(kind):
        return _build(kind.value_type, path, named)
    if pa.types.is_decimal(kind):
        return _read_decimal
    if pa.types.is_float16(kind) or pa.types.is_float32(kind):
        return _build_shortener(np.float16 if pa.types.is_float16(kind) else np.float32)
    if pa.types.is_struct(kind):
        return _build_struct(kind, path, named)
    if pa.types.is_map(kind):
        return _build_map(kind)
    if any(is_list(kind) for is_list in LISTS):
        convert = _build(kind.value_type, "", ())
        return None if convert is None else _convert_list(convert)
    return None


LISTS = (
    pa.types.is_list,
    pa.types.is_large_list,
    pa.types.is_fixed_size_list,
    pa.types.is_list_view,
    pa.types.is_large_list_view,
)


def _convert_list(convert: Convert) -> Convert:
    return lambda values: None if values is None else [convert(value) for value in values]


def _build_struct(kind: pa.StructType, path: str, named: Collection[str]) -> Convert:
    fields = [(one.name, _build(one.type, f"{path}.{one.name}", named)) for one in kind]
    converts = [(name, build) for name, build in fields if build is not None]
    always_null = {one.name for one in kind if pa.types.is_null(one.type)}
    kept = {one.name for one in kind if f"{path}.{one.name}" in named}

    def convert(value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is None:
            return None
        for name, convert_field in converts:
            value[name] = convert_field(value[name])
        if None not in value.values():
            return value
        return {
            name: part
            for name, part in value.items()
            if part is not None
            or name in kept
            or _keeps_null(value, name, is_always_null=name in always_null)
        }

    return convert


def _keeps_null(value: Mapping[str, Any], name: str, *, is_always_null: bool) -> bool:
    """Return whether a null field of an object is no padding."""
    if name == "const":
        is_alone = all(one is None for one in value.values())
        is_meant = value.get("type") is None and (is_always_null or is_alone)
        return is_meant or _has_null_type(value)
    return is_always_null or (name == "default" and _allows_null(value))


def _build_map(kind: pa.MapType) -> Convert:
    """Build the conversion of a map, which is an object where its keys are strings."""
    convert = _build(kind.item_type, "", ()) or _keep
    is_object = pa.types.is_string(kind.key_type) or pa.types.is_large_string(kind.key_type)

    def convert_map(pairs: list[tuple[Any, Any]] | None) -> Any:
        if pairs is None:
            return None
        values = [(key, convert(value)) for key, value in pairs]
        return dict(values) if is_object else values

    return convert_map


def _keep(value: Any) -> Any:
    return value


def _build_shortener(number_type: Callable[[float], np.floating[Any]]) -> Convert:
    """Build the conversion of numbers of less precision: to the shortest that is kept as this."""
    return lambda value: None if value is None else float(str(number_type(value)))


def _read_float(value: float | None) -> float | int | None:
    is_integer = value is not None and value.is_integer() and abs(value) < MAX_EXACT_INTEGER
    return int(value) if is_integer and value is not None else value


def _read_decimal(value: Decimal | None) -> float | int | None:
    if value is None:
        return None
    return int(value) if value == value.to_integral_value() else WrittenFloat(f"{value:f}")


def _allows_null(schema: Mapping[str, Any]) -> bool:
    """Return whether a JSON schema allows null."""
    branches = [one for key in ("anyOf", "oneOf") for one in _as_list(schema.get(key))]
    return (
        _has_null_type(schema)
        or None in _as_list(schema.get("enum"))
        or schema.get("nullable") is True
        or any(isinstance(one, Mapping) and _allows_null(one) for one in branches)
    )


def _has_null_type(schema: Mapping[str, Any]) -> bool:
    kinds = schema.get("type")
    return kinds == "null" or "null" in _as_list(kinds)


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
