"""Collects the weights that a backend yields in parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from relax_events.weights.artifact_writer import split_by_bytes

if TYPE_CHECKING:
    from torch import Tensor

    from relax_events.training.backend.protocol import TrainerBackend

BUCKET_BYTES = 2**28
"""Size of a part: a copy from the device takes far longer than its start, and rank 0's device holds
one part in addition to the model."""


def weight_parts(backend: TrainerBackend) -> Iterator[dict[str, Tensor]]:
    """Yield the weights in parts, each valid until the next is asked for. Collective."""
    return backend.weight_buckets(max_bytes=BUCKET_BYTES)


def collect_weights(backend: TrainerBackend) -> dict[str, Tensor]:
    """Copy the weights to rank 0's CPU; nothing on the other ranks. Collective."""
    return {
        name: tensor.to("cpu", copy=True)
        for part in weight_parts(backend)
        for name, tensor in part.items()
    }


def split_into_buckets(tensors: Mapping[str, Tensor], *, max_bytes: int) -> Iterator[list[str]]:
    """Yield the names in order, in parts of at most so many bytes; a larger tensor is a part of its
    own.
    """
    return split_by_bytes(tensors, lambda name: tensors[name].nbytes, max_bytes=max_bytes)
