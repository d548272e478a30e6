"""Arrays of events that are read, and arrays that are still in the object store."""

from __future__ import annotations

import numpy as np
import pytest

from relax_events.events.parts import ObjectRef, StoredArray
from relax_events.events.tensors import dense

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
