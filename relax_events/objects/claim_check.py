"""The claim check: large arrays of an event are stored in the object store and sent by
reference.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Collection
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from relax_events.errors import ObjectError
from relax_events.events.parts import StoredArray
from relax_events.objects.store import ObjectStore

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

EventT = TypeVar("EventT", bound="DataclassInstance")


def check_in(
    event: EventT, store: ObjectStore, *, claim_check_threshold_bytes: int, folder: str = ""
) -> EventT:
    """Store the large arrays of an event and return the event with references in their place.

    An event without large arrays is returned unchanged.

    Args:
        event: A dataclass; nested fields are not searched.
        store: The content-addressed store of the arrays.
        claim_check_threshold_bytes: Arrays of more bytes are stored.
        folder: A folder of the store, with a slash at its end.
    Raises:
        ObjectError: The store failed.
    """
    stored = {}
    for name in _array_fields(type(event)):
        value = getattr(event, name)
        if isinstance(value, np.ndarray) and value.nbytes > claim_check_threshold_bytes:
            stored[name] = store_array(value, store, folder=folder)
    return _replaced(event, stored)


def check_out(event: EventT, store: ObjectStore, *, leave: Collection[str] = ()) -> EventT:
    """Fetch the stored arrays of an event and return the event with read-only arrays.

    An event without stored arrays is returned unchanged.

    Args:
        event: A dataclass.
        store: The store that holds the arrays.
        leave: Fields that keep their references, for example to be forwarded.
    Raises:
        ObjectError: An object is missing, altered, or not of the declared dtype and shape; the text
            names it.
    """
    fetched = {}
    for name in _array_fields(type(event)):
        value = getattr(event, name)
        if isinstance(value, StoredArray) and name not in leave:
            fetched[name] = fetch_array(value, store)
    return _replaced(event, fetched)


def count_array_bytes(event: DataclassInstance) -> int:
    """Return how many bytes the arrays of an event take, without arrays that are in the store."""
    num_bytes = 0
    for name in _array_fields(type(event)):
        value = getattr(event, name)
        if isinstance(value, np.ndarray):
            num_bytes += value.nbytes
    return num_bytes


def store_array(array: NDArray[Any], store: ObjectStore, *, folder: str = "") -> StoredArray:
    """Store one array in a folder of the store, little-endian and in C order.

    Raises:
        ObjectError: The store failed.
    """
    plain = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    return StoredArray(
        plain.dtype.str,
        array.shape,
        store.put(plain.reshape(-1).view(np.uint8).data, folder=folder),
    )


def fetch_array(stored: StoredArray, store: ObjectStore) -> NDArray[Any]:
    """Fetch one array, as a read-only view of the fetched bytes.

    Raises:
        ObjectError: The object is missing, altered, or not of the declared dtype and shape.
    """
    data = store.get(stored.reference)
    try:
        return np.frombuffer(data, np.dtype(stored.dtype)).reshape(stored.shape)
    except (TypeError, ValueError) as error:
        raise ObjectError(
            f"{stored.reference.uri} holds {len(data)} bytes, which is no array of "
            f"{stored.dtype} and shape {list(stored.shape)}"
        ) from error


@cache
def _array_fields(kind: type[DataclassInstance]) -> tuple[str, ...]:
    """Return the fields that may hold arrays, by their annotations."""
    hints = typing.get_type_hints(kind)
    return tuple(
        field.name
        for field in dataclasses.fields(kind)
        if StoredArray in typing.get_args(hints[field.name])
    )


def _replaced(event: EventT, changes: dict[str, Any]) -> EventT:
    return dataclasses.replace(event, **changes) if changes else event
