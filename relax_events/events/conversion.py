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
from typing import Any

from relax_events.events.parts import Array
from relax_events.events.tensors import pack, unpack

Converter = Callable[[Any], Any]


@cache
def record_writer(cls: type) -> Converter:
    """Return a function from an instance of the dataclass to its Avro record."""
    return _writer(cls) or (lambda value: value)


@cache
def record_reader(cls: type) -> Converter:
    """Return a function from an Avro record to an instance of the dataclass."""
    return _reader(cls) or (lambda value: value)


def _fields(cls: type) -> list[tuple[str, Any]]:
    hints = typing.get_type_hints(cls)
    return [(field.name, hints[field.name]) for field in dataclasses.fields(cls)]


def _optional(kind: Any) -> Any | None:
    """Return X for `X | None` (and Array for `Array | None`), else None."""
    if typing.get_origin(kind) not in (types.UnionType, typing.Union):
        return None
    arms = [arm for arm in typing.get_args(kind) if arm is not type(None)]
    if len(arms) == len(typing.get_args(kind)):
        return None
    return Array if set(arms) == set(typing.get_args(Array)) else arms[0]


def _inner(kind: Any, make: Callable[[Any], Converter | None]) -> Converter | None:
    """Build a converter for optionals, lists and maps from that of their content."""
    if (content := _optional(kind)) is not None:
        convert = make(content)
        return convert and _unless_none(convert)
    if typing.get_origin(kind) is list:
        convert = make(typing.get_args(kind)[0])
        return convert and _each(convert)
    return None


def _unless_none(convert: Converter) -> Converter:
    return lambda value: None if value is None else convert(value)


def _each(convert: Converter) -> Converter:
    return lambda values: [convert(value) for value in values]


def _writer(kind: Any) -> Converter | None:
    if kind == Array:
        return pack
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        parts = [(name, _writer(hint)) for name, hint in _fields(kind)]
        return lambda value: {
            name: convert(getattr(value, name)) if convert else getattr(value, name)
            for name, convert in parts
        }
    return _inner(kind, _writer)


def _reader(kind: Any) -> Converter | None:
    if kind == Array:
        return unpack
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return kind
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        parts = [(name, _reader(hint)) for name, hint in _fields(kind)]
        return lambda record: kind(
            **{name: convert(record[name]) if convert else record[name] for name, convert in parts}
        )
    return _inner(kind, _reader)
