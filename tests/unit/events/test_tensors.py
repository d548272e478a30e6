"""Arrays of events that are read, and arrays that are still in the object store."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from event_samples import rolled_out
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from relax_events.errors import CorruptRecord
from relax_events.events.codec import EventCodec
from relax_events.events.parts import ObjectRef, StoredArray
from relax_events.events.sample_columns import join_one, split_samples
from relax_events.events.tensors import (
    MAX_RUN_BYTES,
    MIN_RUN_VALUES,
    dense,
    pack,
    pack_runs,
    unpack,
    unpack_runs,
)
from relax_events.events.types import SampleRolledOut

STORED = StoredArray("<i4", (5, 2), ObjectRef("memory:///x", bytes(32), 40))


def test_dense_returns_an_available_array_unchanged() -> None:
    array = np.arange(3)
    assert dense(array, what="tokens") is array


def test_dense_error_names_the_field_that_was_not_fetched() -> None:
    with pytest.raises(
        TypeError,
        match=r"^sample a/0: tokens is still in the object store; fetch it with check_out first$",
    ):
        dense(STORED, what="sample a/0: tokens")


def test_length_of_a_stored_array_is_that_of_its_first_axis() -> None:
    assert len(STORED) == len(np.zeros(STORED.shape)) == 5


DTYPES = ["u1", "b1", "i1", "<i2", "<i4", "<i8", "<u2", "<f2", "<f4", "<f8"]
RUNS = st.sampled_from(DTYPES).flatmap(
    lambda dtype: st.lists(
        st.tuples(arrays.from_dtype(np.dtype(dtype)), st.integers(1, 1500)), min_size=1, max_size=4
    ).map(
        lambda runs: np.repeat(
            np.array([value for value, _ in runs], dtype), [length for _, length in runs]
        )
    )
)


@given(RUNS)
def test_array_of_runs_is_read_as_it_was_bit_by_bit(array: np.ndarray) -> None:
    """Also NaN with its bits, and both zeros."""
    packed = pack_runs(array)
    again = unpack_runs(packed)
    assert isinstance(again, np.ndarray)
    assert (again.dtype, again.tobytes()) == (array.dtype, array.tobytes())
    assert not again.flags.writeable
    has_runs = packed.get("run_lengths") is not None
    assert has_runs == (len(array) >= MIN_RUN_VALUES)
    assert not has_runs or len(packed["data"]) + len(packed["run_lengths"]) <= array.nbytes / 2


def test_array_whose_neighbours_differ_has_no_runs() -> None:
    array = np.arange(5000, dtype=np.int32)
    assert pack_runs(array) == pack(array)
    matrix = np.zeros((2000, 2), np.int32)
    assert pack_runs(matrix) == pack(matrix)
    large = np.zeros(MAX_RUN_BYTES // 4 + 1, np.int32)
    assert pack_runs(large) == pack(large)


RUN_BYTES = np.array([1000, 24], "<i4").tobytes()


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": [1023]},
        {"shape": [512, 2]},
        {"shape": []},
        {"run_lengths": RUN_BYTES[:-1]},
        {"run_lengths": RUN_BYTES[:4]},
        {"run_lengths": np.array([1025, -1], "<i4").tobytes()},
        {"run_lengths": np.array([1024, 0], "<i4").tobytes()},
        {"run_lengths": np.array([2**31 - 1, 2**31 - 1], "<i4").tobytes(), "shape": [2**32 - 2]},
        {"run_lengths": b""},
    ],
)
def test_runs_that_do_not_add_up_are_refused_before_they_fill_the_memory(
    changes: dict[str, Any],
) -> None:
    packed = pack_runs(np.repeat(np.array([0, 1], np.uint8), [1000, 24]))
    assert packed["run_lengths"] == RUN_BYTES
    with pytest.raises(CorruptRecord, match="packed tensor"):
        unpack_runs(packed | changes)


def test_old_reader_refuses_runs_and_an_element_of_a_list_has_none() -> None:
    """Released readers do not see the lengths of the runs: an array that is too short is an error,
    never a shorter array."""
    packed = pack_runs(np.zeros(5000, np.float32))
    del packed["run_lengths"]
    with pytest.raises(CorruptRecord, match=r"shape \[5000\] can't have 4 bytes"):
        unpack(packed)
    with pytest.raises(CorruptRecord, match="element of a list"):
        unpack(pack_runs(np.zeros(5000, np.float32)))


def test_masks_of_a_long_sample_take_few_bytes_on_the_log() -> None:
    codec, length = EventCodec(), 20_000
    arrays_of: dict[str, Any] = {
        "tokens": np.arange(length, dtype=np.int32),
        "rollout_logprobs": np.linspace(-1, 0, length, dtype=np.float32),
        "loss_mask": np.repeat(np.array([0, 1], np.uint8), [2000, length - 2000]),
    }
    record = codec.encode(join_one(rolled_out(**arrays_of)))
    assert len(record) < 8 * length + 1000
    (again,) = split_samples(codec.decode(record))
    assert isinstance(again, SampleRolledOut)
    for name, array in arrays_of.items():
        assert np.array_equal(dense(getattr(again, name), what=name), array)
