"""Turns event dataclasses into Avro records and back, by converters made once from the field
types.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable
from enum import StrEnum
from functools import cache
from operator import attrgetter
from typing import Any

from relax_events.events.parts import Array
from relax_events.events.schemas import TYPES_NAMESPACE
from relax_events.events.tensors import pack, pack_runs, unpack, unpack_runs

Converter = Callable[[Any], Any]


@cache
def record_writer(cls: type) -> Converter:
    """Return a function from an instance of the dataclass to its Avro record."""
    return _writer(cls) or (lambda value: value)


@cache
def record_reader(cls: type) -> Converter:
    """Return a function from an Avro record, which it changes, to an instance of the dataclass."""
    return _reader(cls) or (lambda value: value)


def _optional(kind: Any) -> Any | None:
    """Return X for `X | None` (and Array for `Array | None`), else None."""
    if typing.get_origin(kind) not in (types.UnionType, typing.Union):
        return None
    arms = [arm for arm in typing.get_args(kind) if arm is not type(None)]
    if len(arms) == len(typing.get_args(kind)):
        return None
    return Array if set(arms) == set(typing.get_args(Array)) else arms[0]


def _each(kind: Any, make: Callable[..., Converter | None]) -> Converter | None:
    """Build the converter of a list from that of its content. Arrays in a list have no runs: their
    number is bounded by the record's bytes alone.
    """
    if typing.get_origin(kind) is not list:
        return None
    if (convert := make(typing.get_args(kind)[0], in_list=True)) is None:
        return None
    if _optional(typing.get_args(kind)[0]) is not None:
        return lambda values: [None if value is None else convert(value) for value in values]
    return lambda values: [convert(value) for value in values]


def _find_converters(
    cls: type, make: Callable[..., Converter | None]
) -> list[tuple[str, Converter]]:
    """Return the fields that need a converter; a converter of a value that may be missing is called
    for values only.
    """
    fields = typing.get_type_hints(cls)
    converters = ((field.name, make(fields[field.name])) for field in dataclasses.fields(cls))
    return [(name, convert) for name, convert in converters if convert is not None]


def _writer(kind: Any, *, in_list: bool = False) -> Converter | None:
    if kind == Array:
        return pack if in_list else pack_runs
    if (content := _optional(kind)) is not None:
        return _as_branch(content, _writer(content, in_list=in_list))
    if not _is_record(kind):
        return _each(kind, _writer)
    names, converted = (
        [field.name for field in dataclasses.fields(kind)],
        _find_converters(kind, _writer),
    )
    values_of = attrgetter(*names, "__class__")  # a tuple, also of one field

    def write(value: Any) -> dict[str, Any]:
        record: dict[str, Any] = dict(zip(names, values_of(value), strict=False))
        for name, convert in converted:
            if (content := record[name]) is not None:
                record[name] = convert(content)
        return record

    return write


def _as_branch(kind: Any, convert: Converter | None) -> Converter | None:
    """Name the record that is written: fastavro would else compare it with the schema of each
    branch of the union, field by field.
    """
    if convert is None or not (kind == Array or _is_record(kind)):
        return convert
    name = f"{TYPES_NAMESPACE}.{'PackedTensor' if kind == Array else kind.__name__}"
    return lambda value: (name, convert(value))


def _reader(kind: Any, *, in_list: bool = False) -> Converter | None:
    if kind == Array:
        return unpack if in_list else unpack_runs
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return {member.value: member for member in kind}.__getitem__
    if (content := _optional(kind)) is not None:
        return _reader(content, in_list=in_list)
    if not _is_record(kind):
        return _each(kind, _reader)
    converted = _find_converters(kind, _reader)

    def read(record: dict[str, Any]) -> Any:
        for name, convert in converted:
            if (content := record[name]) is not None:
                record[name] = convert(content)
        return kind(**record)

    return read


def _is_record(kind: Any) -> bool:
    return dataclasses.is_dataclass(kind) and isinstance(kind, type)
