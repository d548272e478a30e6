"""Puts the events of a prompt group's samples into one event, and takes them apart again.

A rollout worker finishes the samples of a prompt group together, and each role reads them together.
As one record they cost a broker and its clients a fraction of what a record for each costs: the
prompt, the metadata and most of the key are the same in all of them, and their arrays lie one after
the other. So records hold prompt groups, and roles handle samples.

    SampleRolledOut     PromptGroupRolledOut
    SampleScored        PromptGroupScored
    LogprobsComputed    PromptGroupEvaluated
    SampleReady         PromptGroupReady

What one record can't hold stays a record for each sample: arrays that are larger together than a
record should be, and what only the event of a single sample has a field for. Readers take both.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import accumulate
from operator import attrgetter
from typing import Any

import numpy as np

from relax_events.errors import CorruptRecord
from relax_events.events.parts import Array, GenerationKey, SampleKey, now_micros
from relax_events.events.types import (
    Event,
    LogprobsComputed,
    PromptGroupEvaluated,
    PromptGroupReady,
    PromptGroupRolledOut,
    PromptGroupScored,
    SampleReady,
    SampleRolledOut,
    SampleScored,
)

MAX_ARRAY_BYTES = 256 * 1024
"""Bytes of the arrays of one record's samples: well below the smallest record limit of brokers, and
a part of a fetch."""
SingleEvent = SampleRolledOut | SampleScored | LogprobsComputed | SampleReady
ARRAYS = (Array, Array | None)
LENGTH_BYTES, NUMBER_BYTES = 4, 8
MAX_SAMPLES_PER_PROMPT = 4096
"""What a prompt group of any run has at most."""
PromptGroupEvent = (
    PromptGroupRolledOut | PromptGroupScored | PromptGroupEvaluated | PromptGroupReady
)
SINGLE_EVENTS: dict[type[PromptGroupEvent], type[SingleEvent]] = {
    PromptGroupRolledOut: SampleRolledOut,
    PromptGroupScored: SampleScored,
    PromptGroupEvaluated: LogprobsComputed,
    PromptGroupReady: SampleReady,
}
"""The event of a single sample, by the event of several."""


class _Form:
    """How the fields of one sample's event lie in the event of several, by their types there."""

    def __init__(self, group: type[PromptGroupEvent], single: type[SingleEvent]) -> None:
        kinds, single_kinds = typing.get_type_hints(group), typing.get_type_hints(single)
        self.group: Callable[..., PromptGroupEvent] = group
        self.single: Callable[..., SingleEvent] = single
        self.shared_key = [field.name for field in dataclasses.fields(GenerationKey)]
        self.own_key = [name for name in typing.get_type_hints(SampleKey) if name in kinds]
        placed = {name: kind for name, kind in single_kinds.items() if name in kinds}
        self.columns = [name for name, kind in placed.items() if kind in ARRAYS]
        self.numbers = [
            name for name, kind in placed.items() if kind is float and kinds[name] in ARRAYS
        ]
        self.own = [
            name
            for name, kind in placed.items()
            if name in self.numbers or _is_list_of(kinds[name], kind)
        ]
        self.own_defaults = {
            field.name: _default_of(field)
            for field in dataclasses.fields(single)
            if field.name in self.own and _has_default(field)
        }
        elsewhere = {"key", *self.columns, *self.own}
        self.shared = [name for name in placed if name not in elsewhere]
        self.absent = {
            field.name: _default_of(field)()
            for field in dataclasses.fields(single)
            if field.name not in placed
        }
        self.shared_of = _values_of(*self.shared, *(f"key.{name}" for name in self.shared_key))
        self.shared_of_group = _values_of(*self.shared)
        self.own_of = _values_of(*(f"key.{name}" for name in self.own_key), *self.own)
        self.columns_of = _values_of(*self.columns)
        self.absent_of, self.absent_values = _values_of(*self.absent), tuple(self.absent.values())


def _is_list_of(kind: Any, item: Any) -> bool:
    return typing.get_origin(kind) is list and typing.get_args(kind) == (item,)


def _has_default(field: dataclasses.Field[Any]) -> bool:
    missing = dataclasses.MISSING
    return field.default is not missing or field.default_factory not in (missing, now_micros)


def _default_of(field: dataclasses.Field[Any]) -> Callable[[], Any]:
    """Return a function that makes the field's default."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory
    return lambda: field.default


def _values_of(*names: str) -> Callable[[Any], tuple[Any, ...]]:
    """Return a getter of a tuple, also of one field or none."""
    if not names:
        return lambda _: ()
    get = attrgetter(*names)
    return get if len(names) > 1 else lambda value: (get(value),)


@cache
def _forms() -> dict[type, _Form]:
    """Return how events are put together and taken apart, by the kinds of both."""
    forms: dict[type, _Form] = {}
    for group, single in SINGLE_EVENTS.items():
        forms[group] = forms[single] = _Form(group, single)
    return forms


def join_samples(
    samples: Sequence[SingleEvent], *, max_array_bytes: int = MAX_ARRAY_BYTES
) -> Iterator[SingleEvent | PromptGroupEvent]:
    """Yield the events of samples, neighbours of one generation of a prompt group as one event
    where possible.

    Args:
        samples: Events of one kind.
        max_array_bytes: Arrays of one event take at most so many bytes, or belong to one sample.
    """
    if not samples:
        return
    form = _forms()[type(samples[0])]
    taken: dict[int, SingleEvent] = {}
    taken_bytes, taken_frame = 0, None
    for sample in samples:
        num_bytes, frame = _measure(form, sample)
        is_another = frame != taken_frame or sample.key.sample_index in taken
        if taken and (is_another or taken_bytes + num_bytes > max_array_bytes):
            yield _join(form, list(taken.values()))
            taken, taken_bytes = {}, 0
        if frame is None:
            yield sample
            continue
        taken[sample.key.sample_index] = sample
        taken_bytes, taken_frame = taken_bytes + num_bytes, frame
    if taken:
        yield _join(form, list(taken.values()))


def _measure(form: _Form, sample: SingleEvent) -> tuple[int, tuple[Any, ...] | None]:
    """Return the bytes of a sample's columns, and what samples of one event have in common: shared
    fields, columns and their types. None if the sample can't lie in an event of several.
    """
    key, cannot = sample.key, (0, None)
    end = min(key.samples_per_prompt, MAX_SAMPLES_PER_PROMPT)
    if (
        key.sample_id != f"{key.prompt_group_id}/{key.sample_index}"
        or not 0 <= key.sample_index < end
    ):
        return cannot
    absent = form.absent_of(sample)
    if np.ndarray in map(type, absent) or absent != form.absent_values:
        return cannot
    num_bytes, types, shape = LENGTH_BYTES + NUMBER_BYTES * len(form.numbers), list[Any](), None
    for column in form.columns_of(sample):
        if column is None:
            types.append(None)
            continue
        if shape is None:
            shape = column.shape
        if not isinstance(column, np.ndarray) or column.shape != shape or len(shape) != 1:
            return cannot
        types.append(column.dtype.str)  # a dtype itself may equal None
        num_bytes += column.nbytes
    return num_bytes, (*form.shared_of(sample), *types)


def _join(form: _Form, samples: Sequence[SingleEvent]) -> SingleEvent | PromptGroupEvent:
    first = samples[0]
    if len(samples) == 1:
        return first
    shared = dict(zip((*form.shared, *form.shared_key), form.shared_of(first), strict=True))
    key = GenerationKey(**{name: shared.pop(name) for name in form.shared_key})
    own = zip(*map(form.own_of, samples), strict=True)
    fields: dict[str, Any] = dict(zip((*form.own_key, *form.own), map(list, own), strict=True))
    for name, default in form.own_defaults.items():
        if fields[name].count(default()) == len(samples):
            fields[name] = []
    for name in form.numbers:
        fields[name] = np.array(fields[name], np.float64) if fields[name] else None
    columns = list(zip(*map(form.columns_of, samples), strict=True))
    for name, values in zip(form.columns, columns, strict=True):
        fields[name] = None if values[0] is None else np.concatenate(values)
    if columns:
        fields["lengths"] = np.array(list(map(len, columns[0])), np.int32)
    return form.group(key=key, **shared, **fields)


def split_samples(event: Event) -> Sequence[Event]:
    """Return the event of each sample of a prompt group's event; any other event as it is.

    Arrays are views on those of the event.

    Raises:
        CorruptRecord: There are no samples or too many, the fields don't hold the same number of
            them, or the lengths don't fit the arrays.
    """
    if not isinstance(event, PromptGroupEvent):
        return (event,)
    form, num_samples = _forms()[type(event)], len(event.sample_index)
    _check_indexes(event)
    own = [_read_own(form, event, name) for name in form.own]
    columns = _split_columns(form, event)
    own_keys = [getattr(event, name) for name in form.own_key]
    if any(len(values) != num_samples for values in (*own_keys, *own)):
        raise CorruptRecord(f"{_name(event)}: {num_samples} samples, and fields of other numbers")
    # one dictionary of arguments, in which the next sample's values replace the last one's
    key = {name: getattr(event.key, name) for name in form.shared_key}
    fields = dict(zip(form.shared, form.shared_of_group(event), strict=True))
    names = (*form.own, *columns)
    events: list[Event] = []
    for own_key, values in zip(
        zip(*own_keys, strict=True), zip(*own, *columns.values(), strict=True), strict=True
    ):
        key.update(zip(form.own_key, own_key, strict=True))
        key["sample_id"] = f"{event.key.prompt_group_id}/{key['sample_index']}"
        fields.update(zip(names, values, strict=True))
        fields["key"] = SampleKey(**key)
        events.append(form.single(**fields))
    return events


def _check_indexes(event: PromptGroupEvent) -> None:
    """Check that a few bytes on the log can't become any number of samples; raises CorruptRecord as
    `split_samples`.
    """
    indexes = event.sample_index
    end = min(event.key.samples_per_prompt, MAX_SAMPLES_PER_PROMPT)
    if not indexes or min(indexes) < 0 or max(indexes) >= end or len(set(indexes)) < len(indexes):
        raise CorruptRecord(
            f"{_name(event)} must hold samples of different indexes below {end}, got "
            f"{str(indexes)[:80]}"
        )


def _read_own(form: _Form, event: PromptGroupEvent, name: str) -> list[Any]:
    """Return a field's value of each sample; a field without values has its default in all, as in
    records from before it existed.

    Raises:
        CorruptRecord: As `split_samples`.
    """
    values: list[Any] | None = getattr(event, name)
    if name in form.numbers and values is not None:
        values = _read_numbers(event, name)
    if not values and name in form.own_defaults:
        return [form.own_defaults[name]() for _ in event.sample_index]
    return values or []


def _read_numbers(event: PromptGroupEvent, name: str) -> list[float]:
    """Return a number of each sample; raises CorruptRecord as `split_samples`."""
    array = getattr(event, name)
    if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind != "f":
        raise CorruptRecord(f"{_name(event)}: {name} must hold a number for each sample")
    numbers: list[float] = array.tolist()
    return numbers


def _split_columns(form: _Form, event: PromptGroupEvent) -> dict[str, list[np.ndarray]]:
    """Return the rows of each sample, by column.

    Raises:
        CorruptRecord: As `split_samples`.
    """
    if isinstance(event, PromptGroupScored):
        return {}
    lengths, num_samples = event.lengths, len(event.sample_index)
    if (
        not isinstance(lengths, np.ndarray)
        or lengths.shape != (num_samples,)
        or lengths.dtype.kind not in "iu"
        or lengths.min() < 0
    ):
        raise CorruptRecord(f"{_name(event)} needs a length of each of its {num_samples} samples")
    ends = list(accumulate(lengths.tolist()))
    bounds, total = list(zip([0, *ends], ends, strict=False)), ends[-1]
    split = {}
    for name in form.columns:
        if (column := getattr(event, name)) is None:
            continue
        if not isinstance(column, np.ndarray) or column.shape != (total,):
            raise CorruptRecord(
                f"{_name(event)}: {name} must hold {total} values, as its lengths add up to, got "
                f"shape {list(column.shape)}"
            )
        split[name] = [column[begin:end] for begin, end in bounds]
    return split


def _name(event: PromptGroupEvent) -> str:
    return f"{type(event).__name__} of {event.key.prompt_group_id}"
