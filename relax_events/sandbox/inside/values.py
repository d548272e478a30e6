"""Encodes values between the processes of the solution and the tests: plain data is copied, other
objects become references.

Plain data are the builtin types and a few of the standard library's; a copy behaves by its own
type's rules, even if the solution has redefined them. Every other value is a reference to an object
of the other process.
"""

from __future__ import annotations

import builtins
from collections import Counter, OrderedDict, deque, namedtuple
from collections.abc import Callable, Mapping
from datetime import date, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any

LARGE_INTEGER_BITS = 1000
"""Larger numbers are written in hexadecimal, because Python limits the digits of decimal ones."""
CONTAINERS: dict[str, type] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": deque,
}
MAPPINGS: dict[str, type] = {"dict": dict, "Counter": Counter, "OrderedDict": OrderedDict}
MUTABLE = (list, dict, set, bytearray, deque)
TUPLE_METHODS = frozenset(dir(tuple))
CONSTRUCTORS: dict[str, Callable[..., Any]] = {
    "Decimal": Decimal,
    "Fraction": Fraction,
    "datetime": datetime,
    "date": date,
    "timedelta": timedelta,
    "complex": complex,
    "range": range,
    "slice": slice,
}

SHARED_BUILTINS = {
    name: value for name, value in vars(builtins).items() if isinstance(value, type)
} | {
    name: getattr(builtins, name)
    for name in (
        "abs",
        "all",
        "any",
        "len",
        "max",
        "min",
        "print",
        "repr",
        "round",
        "sorted",
        "sum",
    )
}
"""Builtins that each process has itself, sent by name. Those that run code are excluded."""

Refer = Callable[[Any], list[Any]]
Resolve = Callable[[list[Any]], Any]


def encode(value: Any, refer: Refer) -> Any:
    """Return JSON for a value; `refer` encodes an object that is not copied.

    Raises:
        RecursionError: The value is nested too deeply, or contains itself.
    """
    kind = type(value)
    if value is None or kind in (bool, float, str):
        return value
    if kind is int:
        return value if value.bit_length() <= LARGE_INTEGER_BITS else ["int", hex(value)]
    if kind in (bytes, bytearray):
        return [kind.__name__, value.hex()]
    if (arguments := _arguments(value)) is not None:
        return [kind.__name__, *(encode(argument, refer) for argument in arguments)]
    fields = getattr(kind, "_fields", None)
    if issubclass(kind, tuple) and isinstance(fields, tuple):
        return [
            "namedtuple",
            kind.__name__,
            list(map(str, fields)),
            [encode(one, refer) for one in tuple.__iter__(value)],
        ]
    for name, container in {**CONTAINERS, **MAPPINGS}.items():
        if kind is container:
            return _encode_container(name, value, refer)
    return _encode_subclass(value, refer)


def _encode_container(name: str, value: Any, refer: Refer) -> list[Any]:
    if name in MAPPINGS:
        return [name, [[encode(key, refer), encode(one, refer)] for key, one in dict.items(value)]]
    return [name, [encode(one, refer) for one in value]]


def _encode_subclass(value: Any, refer: Refer) -> Any:
    """Encode an instance of a subclass: as its builtin base type, or as a reference."""
    if (
        name := next((name for name, one in SHARED_BUILTINS.items() if one is value), None)
    ) is not None:
        return ["builtin", name]
    if isinstance(value, type):
        return refer(value)
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        listed = encode(value.tolist(), refer)
        return (
            ["ndarray", value.dtype.str, list(value.shape), listed]
            if hasattr(value, "reshape") and value.shape
            else listed
        )
    plain: dict[type, Callable[[Any], Any]] = {
        int: int.__int__,
        float: float.__float__,
        str: str.__str__,
        bytes: bytes.__bytes__,
    }
    for base, as_plain in plain.items():
        if isinstance(value, base):
            return encode(as_plain(value), refer)
    if isinstance(value, Counter):
        return _encode_container("Counter", value, refer)
    if isinstance(value, dict):
        return _encode_container("dict", value, refer)
    iterators: dict[type, Callable[[Any], Any]] = {
        list: list.__iter__,
        tuple: tuple.__iter__,
        set: set.__iter__,
        frozenset: frozenset.__iter__,
    }
    for container, iterate in iterators.items():
        if isinstance(value, container):
            return [container.__name__, [encode(one, refer) for one in iterate(value)]]
    return refer(value)


def _arguments(value: Any) -> tuple[Any, ...] | None:
    """Return the constructor arguments of a value of a `CONSTRUCTORS` type, or None."""
    kind = type(value)
    if kind is Decimal:
        return (str(value),)
    if kind is Fraction:
        return (value.numerator, value.denominator)
    if kind is datetime:
        return (
            (
                value.year,
                value.month,
                value.day,
                value.hour,
                value.minute,
                value.second,
                value.microsecond,
            )
            if value.tzinfo is None
            else None
        )
    if kind is date:
        return (value.year, value.month, value.day)
    if kind is timedelta:
        return (value.days, value.seconds, value.microseconds)
    if kind is complex:
        return (value.real, value.imag)
    return (value.start, value.stop, value.step) if kind in (range, slice) else None


def decode(data: Any, resolve: Resolve) -> Any:
    """Return the value that is encoded in JSON; `resolve` looks up references.

    Raises:
        ValueError, TypeError, KeyError: The data is not in the format of `encode`.
    """
    if not isinstance(data, list):
        if isinstance(data, Mapping):
            raise TypeError("a value must not be a JSON object")
        return data
    name, *rest = data
    if name == "int":
        return int(rest[0], 16)
    if name in ("bytes", "bytearray"):
        content = bytes.fromhex(rest[0])
        return content if name == "bytes" else bytearray(content)
    if name in CONSTRUCTORS:
        return CONSTRUCTORS[name](*(decode(one, resolve) for one in rest))
    if name in CONTAINERS:
        return CONTAINERS[name](decode(one, resolve) for one in rest[0])
    if name in MAPPINGS:
        return MAPPINGS[name]({decode(key, resolve): decode(one, resolve) for key, one in rest[0]})
    if name == "namedtuple":
        return _named_tuple(rest[0], rest[1], [decode(one, resolve) for one in rest[2]])
    if name == "ndarray":
        return _array(rest[0], rest[1], decode(rest[2], resolve))
    return resolve(data)


def _named_tuple(name: str, fields: list[str], values: list[Any]) -> tuple[Any, ...]:
    """Return a named tuple; a plain one where a field would replace a method by a function."""
    if any(
        field in TUPLE_METHODS and callable(one) for field, one in zip(fields, values, strict=True)
    ):
        return tuple(values)
    return namedtuple(name, fields, rename=True)(*values)


def _array(dtype: str, shape: list[int], values: Any) -> Any:
    import numpy as np

    return np.array(values, dtype=np.dtype(dtype)).reshape(shape)


def replace(old: Any, new: Any) -> None:
    """Make a mutable value equal to another of its type, in place; do nothing for another type."""
    if type(old) is not type(new):
        return
    if isinstance(old, (list, bytearray)):
        old[:] = new
    elif isinstance(old, (dict, set)):
        old.clear()
        old.update(new)
    elif isinstance(old, deque):
        old.clear()
        old.extend(new)
