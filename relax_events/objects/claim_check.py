"""The claim check: large arrays of an event are stored in the object store and sent by
reference.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from relax_events.errors import ObjectError, StoreUnavailable
from relax_events.events.parts import StoredArray
from relax_events.objects.store import ObjectStore

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

EventT = TypeVar("EventT", bound="DataclassInstance")
MAX_AHEAD_BYTES = 256 * 1024**2
NUM_THREADS = 8


class ArraysAhead:
    """Fetches stored arrays in threads before `check_out` takes them, each once, as far as they fit
    into a number of bytes. Used by one thread, as a context manager.
    """

    def __init__(
        self,
        store: ObjectStore,
        *,
        leave: Collection[str] = (),
        check: Callable[[Any], None] = lambda event: None,
        max_bytes: int = MAX_AHEAD_BYTES,
    ) -> None:
        """Start no thread yet.

        Args:
            store: Of the arrays.
            leave: Fields that keep their references.
            check: Rejects an event before `check_out` returns its arrays.
            max_bytes: Of the arrays that were begun and not yet taken.
        """
        self._store, self._hasty, self._room = store, store.without_waiting(), max_bytes
        self._leave, self._check = leave, check
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="arrays")
        self._coming: dict[tuple[object, ...], Future[NDArray[Any]]] = {}

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Drop fetches that have not begun."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def begin(self, event: DataclassInstance) -> None:
        """Begin to fetch the arrays of an event, as far as they fit."""
        for _, stored in _stored_arrays(event, self._leave):
            key, num_bytes = _key(stored), stored.reference.num_bytes
            if key not in self._coming and 0 < num_bytes <= self._room:
                self._room -= num_bytes
                self._coming[key] = self._threads.submit(fetch_array, stored, self._hasty)

    def check_out(self, event: EventT) -> EventT:
        """Return an event with its arrays. One that was not begun, or that failed, is fetched by
        this thread, which waits for the store during an outage; errors as for the function
        `check_out`, and those of the check.
        """
        self._check(event)
        arrays = {name: self._fetch(stored) for name, stored in _stored_arrays(event, self._leave)}
        return _replaced(event, arrays)

    def _fetch(self, stored: StoredArray) -> NDArray[Any]:
        if (coming := self._coming.pop(_key(stored), None)) is not None:
            self._room += stored.reference.num_bytes
            try:
                return coming.result()
            except (ObjectError, StoreUnavailable):
                pass
        return fetch_array(stored, self._store)


def _key(stored: StoredArray) -> tuple[object, ...]:
    return stored.reference, stored.dtype, *stored.shape


def _stored_arrays(
    event: DataclassInstance, leave: Collection[str]
) -> Iterator[tuple[str, StoredArray]]:
    """Yield the arrays of an event that are in the store, by their fields."""
    for name in _array_fields(type(event)):
        value = getattr(event, name)
        if isinstance(value, StoredArray) and name not in leave:
            yield name, value


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
    arrays = {name: fetch_array(stored, store) for name, stored in _stored_arrays(event, leave)}
    return _replaced(event, arrays)


def count_array_bytes(event: DataclassInstance) -> int:
    """Return how many bytes the arrays of an event take, without arrays that are in the store."""
    return sum(array.nbytes for array in list_arrays(event))


def list_arrays(event: DataclassInstance) -> list[NDArray[Any]]:
    """Return the arrays of an event, without those that are in the store."""
    values = (getattr(event, name) for name in _array_fields(type(event)))
    return [value for value in values if isinstance(value, np.ndarray)]


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
