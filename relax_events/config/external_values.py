"""What the keys of a run file name outside of it: code, programs, addresses, files, variables. Each
key says so with its type.

A run file of one's own may name anything. The description of a run on the log was written by
another user, and what it names is shown before any of it is used.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from relax_events.config.addresses import is_loopback


class Names(StrEnum):
    """What the value of a key names, and how it is used."""

    NOTHING = "nothing"
    CODE = "code that would be run"
    PROGRAM = "a program that would be started"
    ARGUMENTS = "arguments of a program that would be started"
    ADDRESS = "an address that would be contacted"
    LISTENER = "an address on which the run would listen"
    FILE = "a file or folder that would be used"
    VARIABLE = "an environment variable that code would be given"
    DATA = "data that would be read"
    OPTIONS = "an option of a function, which may name anything"
    QUANTITIES = "an option of a generator, an optimizer or an algorithm"


Text = Annotated[str, Names.NOTHING]
Texts = Annotated[tuple[str, ...], Names.NOTHING]
Code = Annotated[str, Names.CODE]
Program = Annotated[tuple[str, ...], Names.PROGRAM]
Address = Annotated[str, Names.ADDRESS]
Addresses = Annotated[tuple[str, ...], Names.ADDRESS]
Listener = Annotated[str, Names.LISTENER]
FilePath = Annotated[Path, Names.FILE]
Options = Annotated[dict[str, Any], Names.OPTIONS]
"""Any of them is listed: what a number or a word does is up to the function."""
Quantities = Annotated[dict[str, Any], Names.QUANTITIES]
"""Numbers and single words are quantities and choices of ours, and name nothing."""

GENERATED_DATA = (
    "reasoning_gym:",
    "synthetic_text:",
    "synthetic_images:",
    "synthetic_videos:",
    "synthetic_audio:",
)
_WORDS = re.compile(r"[\w -]{0,64}")
_PROTECTIONS = ("allow", "trust")
"""Begin the names of options that take a protection away."""
_TELLING_KEY = re.compile(
    r"variable|env|token|user|host|ur[li]|address|endpoint|server|socket|path|file|folder|dir|repo|command|program|python|module|function",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Named:
    """A value of a run file that names something outside of it."""

    key: str
    value: Any
    what: Names


def names_in(
    tree: Mapping[str, Any], model: type[BaseModel], *, prefix: str = ""
) -> Iterator[Named]:
    """Give what the values of a run file name outside of it, key by key. Values that are the
    default name nothing new.

    Args:
        tree: The run file, as JSON has it.
        model: Its type.
        prefix: Of the keys, with a dot at its end.
    """
    for name, value in tree.items():
        field = model.model_fields.get(name)
        if field is None or value is None:
            continue
        if (inner := find_table(field.annotation)) is not None:
            for key, table in _tables(
                value, f"{prefix}{name}", by_name=get_origin(field.annotation) is dict
            ):
                yield from names_in(table, inner, prefix=f"{key}.")
        elif value != _default(field):
            yield from _named(f"{prefix}{name}", value, find_kind(field))


def find_kind(field: FieldInfo) -> Names:
    """Return what a key names; a key whose type does not say names anything, unless it holds
    numbers, truths and fixed words alone.
    """
    usual = Names.NOTHING if _is_plain(field.annotation) else Names.OPTIONS
    return next(_marks(field), usual)


def is_marked(field: FieldInfo) -> bool:
    """Return whether a key says what it names."""
    return next(_marks(field), None) is not None


def find_table(kind: Any) -> type[BaseModel] | None:
    """Return the table that a key holds, alone, in a list or by name; None for other keys."""
    if isinstance(kind, type) and get_origin(kind) is None:
        return kind if issubclass(kind, BaseModel) else None
    return next((table for arm in get_args(kind) if (table := find_table(arm)) is not None), None)


def _marks(field: FieldInfo) -> Iterator[Names]:
    yield from (mark for mark in field.metadata if isinstance(mark, Names))
    yield from _marks_within(field.annotation)


def _marks_within(kind: Any) -> Iterator[Names]:
    for arm in get_args(kind):
        if isinstance(arm, Names):
            yield arm
        yield from _marks_within(arm)


def _is_plain(kind: Any) -> bool:
    """Return whether a type holds numbers, truths, fixed words, or sequences of them alone."""
    origin = get_origin(kind)
    if origin is Literal:
        return True
    if origin is Annotated:
        return _is_plain(get_args(kind)[0])
    if origin in (Union, UnionType, tuple, list):
        return all(_is_plain(arm) for arm in get_args(kind) if arm is not Ellipsis)
    return isinstance(kind, type) and issubclass(kind, int | float | NoneType | Enum)


def _tables(value: Any, key: str, *, by_name: bool) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Give the tables of a key: itself, a list's tables, or tables by name."""
    if isinstance(value, list):
        yield from ((f"{key}.{index}", table) for index, table in enumerate(value))
    elif by_name:
        yield from ((f"{key}.{name}", table) for name, table in value.items())
    else:
        yield key, value


def _default(field: FieldInfo) -> Any:
    value = None if field.is_required() else field.get_default(call_default_factory=True)
    return (
        list(value)
        if isinstance(value, tuple)
        else str(value)
        if isinstance(value, Path)
        else value
    )


def _named(key: str, value: Any, kind: Names) -> Iterator[Named]:
    if kind in (Names.OPTIONS, Names.QUANTITIES):
        yield from (
            Named(path, leaf, kind)
            for path, leaf in _leaves(value, key)
            if kind is Names.OPTIONS or _may_name_something(path, leaf)
        )
    elif kind is Names.ARGUMENTS:
        yield Named(key, value, kind)  # their order matters
    elif kind is not Names.NOTHING:
        yield from (
            Named(path, leaf, kind)
            for path, leaf in _leaves(value, key, by_index=False)
            if _is_outside(leaf, kind)
        )


def _is_outside(value: Any, kind: Names) -> bool:
    text = str(value)
    if kind is Names.CODE:
        return text.rpartition(":")[0].endswith(".py")
    if kind is Names.DATA:
        return not text.startswith(GENERATED_DATA)
    return bool(text) and not (kind is Names.LISTENER and is_loopback(text))


def _may_name_something(key: str, value: Any) -> bool:
    """Return whether a quantity may name something after all: it is more than a word or two, its
    key says so, or it takes a protection away.
    """
    name = key.rpartition("options.")[2]
    if name.startswith(_PROTECTIONS) and value:
        return True
    if not isinstance(value, str):
        return not (value is None or isinstance(value, int | float) or not value)
    return bool(value) and (bool(_TELLING_KEY.search(name)) or not _WORDS.fullmatch(value))


def _leaves(value: Any, key: str, *, by_index: bool = True) -> Iterator[tuple[str, Any]]:
    """Give the values within a value; with `by_index` each under its own key, and lists and tables
    that are empty.
    """
    if isinstance(value, Mapping) and (value or not by_index):
        for name, inner in value.items():
            yield from _leaves(inner, f"{key}.{name}", by_index=by_index)
    elif isinstance(value, list | tuple) and (value or not by_index):
        for index, inner in enumerate(value):
            yield from _leaves(inner, f"{key}.{index}" if by_index else key, by_index=by_index)
    else:
        yield key, value
