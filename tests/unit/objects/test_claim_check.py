from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from relax_events.errors import ObjectError
from relax_events.events.parts import Array, ObjectRef, StoredArray
from relax_events.events.types import SampleEvaluated
from relax_events.objects import ObjectStore, check_in, check_out
from relax_events.objects.claim_check import count_array_bytes
from tests.event_samples import sample_key

pytestmark = pytest.mark.unit


@dataclass(frozen=True, slots=True)
class TwoArrays:
    name: str
    small: Array
    large: Array
    absent: Array | None = None


@pytest.fixture
def store() -> ObjectStore:
    return ObjectStore.open("memory://")


def two_arrays(large: NDArray[np.generic]) -> TwoArrays:
    return TwoArrays("x", np.arange(4, dtype=np.int32), large)


def test_check_in_stores_only_arrays_above_the_limit(store: ObjectStore) -> None:
    event = two_arrays(np.arange(100, dtype=np.float32))
    stored = check_in(event, store, claim_check_threshold_bytes=399)
    assert stored.small is event.small
    assert isinstance(stored.large, StoredArray)
    assert (stored.large.dtype, stored.large.shape, stored.large.reference.num_bytes) == (
        "<f4",
        (100,),
        400,
    )
    assert len(store.list("")) == 1


def test_check_in_returns_the_same_object_when_nothing_is_large(store: ObjectStore) -> None:
    event = two_arrays(np.arange(100, dtype=np.float32))
    assert check_in(event, store, claim_check_threshold_bytes=400) is event
    assert check_out(event, store) is event
    assert store.list("") == []


@pytest.mark.parametrize(
    "array",
    [
        np.arange(60, dtype=np.int16).reshape(3, 4, 5),
        np.arange(60, dtype=np.float64)[::2],
        np.asfortranarray(np.arange(12, dtype=np.uint8).reshape(3, 4)),
        np.arange(30, dtype=">i4"),
        np.ones((2, 3), dtype=bool),
    ],
)
def test_check_out_gives_equal_arrays_back(store: ObjectStore, array: NDArray[np.generic]) -> None:
    back = check_out(check_in(two_arrays(array), store, claim_check_threshold_bytes=1), store).large
    assert isinstance(back, np.ndarray)
    assert np.array_equal(back, array)
    assert back.shape == array.shape
    assert back.dtype == array.dtype.newbyteorder("<")
    assert not back.flags.writeable


def test_check_in_stores_equal_arrays_once(store: ObjectStore) -> None:
    values = np.arange(100, dtype=np.float32)
    for index in (0, 1):
        event = SampleEvaluated(
            key=sample_key(index=index),
            model_role="reference",
            model_version=0,
            values=values,
        )
        assert isinstance(
            check_in(event, store, claim_check_threshold_bytes=10).values, StoredArray
        )
    assert len(store.list("")) == 1


def test_check_out_names_the_object_when_it_is_missing(store: ObjectStore) -> None:
    uri = store.uri("sha256/00/none")
    with pytest.raises(ObjectError, match=f"can't read {uri}"):
        check_out(
            TwoArrays("x", np.arange(2), StoredArray("<f4", (1,), ObjectRef(uri, bytes(32), 4))),
            store,
        )


@pytest.mark.parametrize(
    ("dtype", "shape"), [("<f4", (3,)), ("<f4", (2, 2)), ("nonsense", (2,)), ("<i2", (-1, 3))]
)
def test_check_out_names_dtype_and_shape_when_the_bytes_do_not_fit(
    store: ObjectStore, dtype: str, shape: tuple[int, ...]
) -> None:
    reference = store.put(bytes(8))
    with pytest.raises(ObjectError, match="holds 8 bytes, which is no array of "):
        check_out(TwoArrays("x", np.arange(2), StoredArray(dtype, shape, reference)), store)


def test_check_out_leaves_pass_through_arrays_in_the_store(store: ObjectStore) -> None:
    stored = check_in(two_arrays(np.arange(100)), store, claim_check_threshold_bytes=1)
    event = check_out(stored, store, leave=("large",))
    assert event.large is stored.large
    assert isinstance(event.small, np.ndarray)
    assert check_in(event, store, claim_check_threshold_bytes=1).large is stored.large


def test_arrays_in_the_store_are_counted_once_they_are_fetched(store: ObjectStore) -> None:
    event = two_arrays(np.arange(100, dtype=np.float32))
    stored = check_in(event, store, claim_check_threshold_bytes=399)
    assert count_array_bytes(stored) == 16
    assert count_array_bytes(check_out(stored, store)) == count_array_bytes(event) == 416
