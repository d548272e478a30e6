"""Puts the events of samples into records, and takes the records apart again.

A rollout worker finishes the samples of a prompt group together, and each role reads them together.
As one record they cost a broker and its clients a fraction of what a record for each costs: the
prompt, the metadata and most of the key are the same in all of them, and their arrays lie one after
the other. So a record holds samples of one generation in columns, and roles handle samples. The
marks of the fields in `types.py` say how a record holds them (ADR 52).

A sample whose neighbours differ in what a record shares, or whose arrays are too large or in the
object store, has a record for itself: columns of one entry.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from operator import attrgetter
from typing import Any

import numpy as np

from relax_events.errors import CorruptRecord
from relax_events.events.parts import Array, Column, GenerationKey, SampleKey, now_micros
from relax_events.events.types import Event, Sample, SampleColumns

MAX_ARRAY_BYTES = 256 * 1024
"""Bytes of the arrays of one record's samples: well below the smallest record limit of brokers, and
a part of a fetch."""
LENGTH_BYTES, NUMBER_BYTES = 4, 8
MAX_SAMPLES_PER_PROMPT = 4096
"""What a prompt group of any run has at most."""


class _Layout:
    """How samples of one kind lie in columns, by the marks of their fields."""

    def __init__(self, sample: type[Sample]) -> None:
        hints = typing.get_type_hints(sample, include_extras=True)
        del hints["key"]
        fields = {field.name: field for field in dataclasses.fields(sample)}

        def fields_in(column: Column | None) -> list[str]:
            return [name for name, hint in hints.items() if _find_column(hint) is column]

        self.sample: Callable[..., Sample] = sample
        self.columns: type[SampleColumns] = _make_columns(sample, hints, fields)
        key_hints = typing.get_type_hints(SampleKey, include_extras=True)
        self.key_columns = [
            name for name, hint in key_hints.items() if _find_column(hint) is Column.EACH
        ]
        self.shared_key = [field.name for field in dataclasses.fields(GenerationKey)]
        self.shared, self.tokens = fields_in(None), fields_in(Column.TOKENS)
        self.numbers = fields_in(Column.PACKED)
        self.optional_numbers = [
            name
            for name in self.numbers
            if types.NoneType in typing.get_args(hints[name].__origin__)
        ]
        self.lists = fields_in(Column.EACH) + self.numbers
        defaults = ((name, _find_default(fields[name])) for name in self.lists)
        self.defaults = {name: default for name, default in defaults if default is not None}
        arrays = [name for name in fields_in(Column.EACH) if hints[name].__origin__ == Array | None]
        self.read_shared = _make_getter(*self.shared, *(f"key.{name}" for name in self.shared_key))
        self.read_shared_columns = _make_getter(*self.shared)
        self.read_lists = _make_getter(*(f"key.{name}" for name in self.key_columns), *self.lists)
        self.read_tokens, self.read_arrays = _make_getter(*self.tokens), _make_getter(*arrays)


def _find_column(hint: Any) -> Column | None:
    return next((mark for mark in typing.get_args(hint) if isinstance(mark, Column)), None)


def _make_columns(
    sample: type[Sample], hints: dict[str, Any], fields: dict[str, dataclasses.Field[Any]]
) -> type[SampleColumns]:
    """Make the dataclass of a record of samples: the Avro record of the same name."""
    marks = [_find_column(hint) for hint in hints.values()]
    column_fields: list[Any] = [("lengths", Array)] if Column.TOKENS in marks else []
    for column, (name, hint) in zip(marks, hints.items(), strict=True):
        kind: Any = hint if column is None else hint.__origin__
        default = _find_default(fields[name])
        if column is Column.EACH:
            kind, default = types.GenericAlias(list, (kind,)), default and list
        elif column is Column.PACKED:
            kind, default = Array | None if default else Array, default and _nothing
        column_fields.append((name, kind, _make_field(default)))
    return dataclasses.make_dataclass(
        sample.__name__.replace("Sample", "Samples"),
        column_fields,
        bases=(SampleColumns,),
        namespace={"__module__": __name__},
        slots=True,
        kw_only=True,
    )


def _find_default(field: dataclasses.Field[Any]) -> Callable[[], Any] | None:
    """Return a function that makes the field's default, None for a field that must be given."""
    if field.default_factory is not dataclasses.MISSING:
        return None if field.default_factory is now_micros else field.default_factory
    return None if field.default is dataclasses.MISSING else lambda: field.default


def _make_field(default: Callable[[], Any] | None) -> Any:
    return dataclasses.field() if default is None else dataclasses.field(default_factory=default)


def _nothing() -> None:
    return None


def _make_getter(*names: str) -> Callable[[Any], tuple[Any, ...]]:
    """Return a getter of a tuple, also of one field or none."""
    if not names:
        return lambda _: ()
    get = attrgetter(*names)
    return get if len(names) > 1 else lambda value: (get(value),)


_LAYOUTS: dict[type[Sample], _Layout] = {
    sample: _Layout(sample) for sample in typing.get_args(Sample)
}
_LAYOUT_OF_COLUMNS = {layout.columns: layout for layout in _LAYOUTS.values()}
RECORD_KINDS: tuple[type, ...] = (
    *(kind for kind in typing.get_args(Event) if kind not in {*_LAYOUTS, SampleColumns}),
    *_LAYOUT_OF_COLUMNS,
)
"""The dataclass of each Avro record that an event or several lie in."""


def get_record_kind(kind: type) -> type:
    """Return the dataclass of the Avro record that events of a kind lie in."""
    layout = _LAYOUTS.get(kind)
    return kind if layout is None else layout.columns


def join_samples(
    samples: Sequence[Sample], *, max_array_bytes: int = MAX_ARRAY_BYTES
) -> Iterator[SampleColumns]:
    """Yield the records of samples: neighbours of one generation of a prompt group share one where
    possible.

    Args:
        samples: Events of one kind.
        max_array_bytes: Arrays of one record take at most so many bytes, or belong to one sample.
    """
    together: dict[int, Sample] = {}
    total_bytes, last_frame = 0, None
    for sample in samples:
        layout = _LAYOUTS[type(sample)]
        num_bytes, frame = _measure(layout, sample)
        is_another = frame is None or frame != last_frame or sample.key.sample_index in together
        if together and (is_another or total_bytes + num_bytes > max_array_bytes):
            yield _join(layout, list(together.values()))
            together, total_bytes = {}, 0
        together[sample.key.sample_index] = sample
        total_bytes, last_frame = total_bytes + num_bytes, frame
    if together:
        yield _join(layout, list(together.values()))


def join_one(sample: Sample) -> SampleColumns:
    """Return the record of a sample alone."""
    return _join(_LAYOUTS[type(sample)], [sample])


def _measure(layout: _Layout, sample: Sample) -> tuple[int, tuple[Any, ...] | None]:
    """Return the bytes of a sample's arrays, and what samples of one record have in common: shared
    fields, arrays along the tokens and their types. None if the sample needs a record for itself.
    """
    num_bytes, types, shape = LENGTH_BYTES + NUMBER_BYTES * len(layout.numbers), list[Any](), None
    for array in layout.read_tokens(sample):
        if array is None:
            types.append(None)
            continue
        if shape is None:
            shape = array.shape
        if not isinstance(array, np.ndarray) or array.shape != shape or len(shape) != 1:
            return 0, None
        types.append(array.dtype.str)  # a dtype itself may equal None
        num_bytes += array.nbytes
    for array in layout.read_arrays(sample):
        num_bytes += array.nbytes if isinstance(array, np.ndarray) else 0
    return num_bytes, (*layout.read_shared(sample), *types)


def _join(layout: _Layout, samples: Sequence[Sample]) -> SampleColumns:
    first, make = samples[0], typing.cast("Callable[..., SampleColumns]", layout.columns)
    shared = dict(zip((*layout.shared, *layout.shared_key), layout.read_shared(first), strict=True))
    key = GenerationKey(**{name: shared.pop(name) for name in layout.shared_key})
    lists = zip(*map(layout.read_lists, samples), strict=True)
    fields: dict[str, Any] = dict(
        zip((*layout.key_columns, *layout.lists), map(list, lists), strict=True)
    )
    for name, default in layout.defaults.items():
        if _are_all(fields[name], default()):
            fields[name] = []
    for name in layout.numbers:
        fields[name] = np.array(fields[name], np.float64) if fields[name] else None
    columns = list(zip(*map(layout.read_tokens, samples), strict=True))
    for name, arrays in zip(layout.tokens, columns, strict=True):
        is_whole = len(arrays) == 1 or arrays[0] is None
        fields[name] = arrays[0] if is_whole else np.concatenate(arrays)
    if columns:
        fields["lengths"] = np.array([sum(array.shape[:1]) for array in columns[0]], np.int32)
    return make(key=key, **shared, **fields)


def _are_all(values: list[Any], default: Any) -> bool:
    if default is None:  # arrays can't be compared
        return {*map(type, values)} == {type(None)}
    return values.count(default) == len(values)


def split_samples(event: Event) -> Sequence[Event]:
    """Return the event of each sample of a record; any other event as it is.

    Arrays are views on the record's arrays.

    Raises:
        CorruptRecord: There are no samples or too many, the fields don't hold the same number of
            them, or the lengths don't fit the arrays.
    """
    if not isinstance(event, SampleColumns):
        return (event,)
    layout, num_samples = _LAYOUT_OF_COLUMNS[type(event)], len(event.sample_index)
    _check_indexes(event)
    lists = _read_lists(layout, event)
    tokens = _split_tokens(layout, event)
    key_lists = [getattr(event, name) for name in layout.key_columns]
    if any(len(values) != num_samples for values in (*key_lists, *lists.values())):
        raise CorruptRecord(f"{_name(event)}: {num_samples} samples, and fields of other numbers")
    # one dictionary of arguments, in which the next sample's values replace the last one's
    key = {name: getattr(event.key, name) for name in layout.shared_key}
    fields = dict(zip(layout.shared, layout.read_shared_columns(event), strict=True))
    names = (*lists, *tokens)
    events: list[Event] = []
    for key_columns, values in zip(
        zip(*key_lists, strict=True),
        zip(*lists.values(), *tokens.values(), strict=True),
        strict=True,
    ):
        key.update(zip(layout.key_columns, key_columns, strict=True))
        key["sample_id"] = f"{event.key.prompt_group_id}/{key['sample_index']}"
        fields.update(zip(names, values, strict=True))
        fields["key"] = SampleKey(**key)
        events.append(layout.sample(**fields))
    return events


def _check_indexes(event: SampleColumns) -> None:
    """Check that a few bytes on the log can't become any number of samples; raises CorruptRecord as
    `split_samples`.
    """
    indexes, end = event.sample_index, MAX_SAMPLES_PER_PROMPT
    if not indexes or min(indexes) < 0 or max(indexes) >= end or len(set(indexes)) < len(indexes):
        raise CorruptRecord(
            f"{_name(event)} must hold samples of different indexes below {end}, got "
            f"{str(indexes)[:80]}"
        )


def _read_lists(layout: _Layout, event: SampleColumns) -> dict[str, list[Any]]:
    """Return the values of the samples by field, without the fields that have their default in all.

    Raises:
        CorruptRecord: As `split_samples`.
    """
    lists: dict[str, list[Any]] = {}
    for name in layout.lists:
        values = getattr(event, name)
        if values is not None and name in layout.numbers:
            values = _read_numbers(event, name)
            if name in layout.optional_numbers:
                values = [None if math.isnan(value) else value for value in values]
        if values or name not in layout.defaults:
            lists[name] = values
    return lists


def _read_numbers(event: SampleColumns, name: str) -> list[float]:
    """Return a number of each sample; raises CorruptRecord as `split_samples`."""
    array = getattr(event, name)
    if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind != "f":
        raise CorruptRecord(f"{_name(event)}: {name} must hold a number for each sample")
    numbers: list[float] = array.tolist()
    return numbers


def _split_tokens(layout: _Layout, event: SampleColumns) -> dict[str, list[Array]]:
    """Return the part of each sample, by array along the tokens. Arrays of a lone sample are taken
    as they are: they may lie in the object store.

    Raises:
        CorruptRecord: As `split_samples`.
    """
    arrays = {name: array for name in layout.tokens if (array := getattr(event, name)) is not None}
    if not layout.tokens:
        return {}
    lengths = typing.cast("Any", event).lengths
    num_samples = len(event.sample_index)
    if (
        not isinstance(lengths, np.ndarray)
        or lengths.shape != (num_samples,)
        or lengths.dtype.kind not in "iu"
        or lengths.min() < 0
    ):
        raise CorruptRecord(f"{_name(event)} needs a length of each of its {num_samples} samples")
    if num_samples == 1:
        return {name: [array] for name, array in arrays.items()}
    ends = list(accumulate(lengths.tolist()))
    bounds, total = list(zip([0, *ends], ends, strict=False)), ends[-1]
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray) or array.shape != (total,):
            raise CorruptRecord(
                f"{_name(event)}: {name} must hold {total} values, as its lengths add up to, got "
                f"shape {list(array.shape)}"
            )
    return {name: [array[begin:end] for begin, end in bounds] for name, array in arrays.items()}


def _name(event: SampleColumns) -> str:
    return f"{type(event).__name__} of {event.key.prompt_group_id}"
