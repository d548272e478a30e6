"""Tensors that are split into buckets and reassembled are unchanged, and have the digest of their
artifact.
"""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from relax_events.weights.artifact_writer import weights_digest
from relax_events.weights.broadcast.buckets import ALIGNMENT, BufferDigest, Layout

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.int64)
SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)
NAMES = st.text("abc.", min_size=1, max_size=4)
BUCKETS = st.integers(1, 6).map(lambda count: count * ALIGNMENT)


@st.composite
def tensor_sets(draw: st.DrawFn) -> dict[str, Tensor]:
    """Make tensors of every kind, empty ones and scalars among them."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    found = draw(st.dictionaries(NAMES, st.tuples(SHAPES, st.sampled_from(DTYPES)), max_size=6))
    return {
        name: (torch.rand(shape, generator=generator) * 200).to(dtype)
        for name, (shape, dtype) in found.items()
    }


@given(tensor_sets(), BUCKETS)
def test_row_put_together_from_buckets_holds_the_tensors_and_has_their_digest(
    tensors: dict[str, Tensor], max_bytes: int
) -> None:
    layout = Layout.from_tensors(tensors)
    row, staging = (
        torch.full((layout.num_bytes,), 255, dtype=torch.uint8),
        torch.empty(max_bytes, dtype=torch.uint8),
    )
    digest = BufferDigest(layout, row)
    for bucket in layout.buckets(max_bytes=max_bytes):
        row[bucket.start : bucket.stop] = layout.gather(bucket, tensors, staging=staging)
        digest.update(bucket)
    views = layout.views(row)
    assert views.keys() == tensors.keys()
    assert all(
        view.dtype == tensors[name].dtype and torch.equal(view, tensors[name])
        for name, view in views.items()
    )
    assert digest.value() == weights_digest(tensors)


@given(tensor_sets(), BUCKETS)
def test_buckets_cover_the_row_once_within_their_bound(
    tensors: dict[str, Tensor], max_bytes: int
) -> None:
    layout = Layout.from_tensors(tensors)
    covered = [
        byte_index for bucket in layout.buckets(max_bytes=max_bytes) for byte_index in bucket
    ]
    assert covered == list(range(layout.num_bytes))
    assert all(0 < len(bucket) <= max_bytes for bucket in layout.buckets(max_bytes=max_bytes))


@given(tensor_sets(), tensor_sets())
def test_layouts_with_equal_names_dtypes_and_shapes_have_equal_digests(
    tensors: dict[str, Tensor], others: dict[str, Tensor]
) -> None:
    def described(tensors: dict[str, Tensor]) -> list[tuple[str, torch.dtype, torch.Size]]:
        return sorted(
            ((name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()),
            key=lambda item: item[0],
        )

    same = described(tensors) == described(others)
    assert (Layout.from_tensors(tensors).digest == Layout.from_tensors(others).digest) == same
    assert (
        Layout.from_tensors({name: tensor * 0 for name, tensor in tensors.items()}).digest
        == Layout.from_tensors(tensors).digest
    )


def test_large_tensors_are_sent_without_a_copy_and_small_ones_together() -> None:
    sizes = {"a": 8, "b": 2000, "c": 8, "d": 8, "e": 496}
    tensors = {name: torch.arange(size, dtype=torch.float32) for name, size in sizes.items()}
    layout, staging = Layout.from_tensors(tensors), torch.empty(4096, dtype=torch.uint8)
    buckets = layout.buckets(max_bytes=4096)
    assert [[entry.name for entry, _ in layout.overlapping(bucket)] for bucket in buckets] == [
        ["a"],
        ["b"],
        ["b"],
        ["c", "d"],
        ["e"],
    ]
    data = [layout.gather(bucket, tensors, staging=staging).data_ptr() for bucket in buckets]
    lies = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    assert data == [staging.data_ptr(), lies["b"], lies["b"] + 4096, staging.data_ptr(), lies["e"]]
