"""Lays a model's tensors out in one contiguous buffer, cut into buckets: the same on both sides of
a broadcast. Pure arithmetic, except for copying tensors.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from itertools import pairwise

import torch
from torch import Tensor

from relax_events.weights.digests import TensorHash, combine_digests
from relax_events.weights.tensor_files import dtype_name

ALIGNMENT = 64
"""Tensors begin at multiples of this, so that each can be viewed in tensor_range."""
SMALL_SHARE = 16
"""A tensor smaller than 1 / this of a bucket shares a bucket with its neighbours."""


@dataclass(frozen=True, slots=True)
class TensorRange:
    """A tensor and its byte range in the buffer."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


@dataclass(frozen=True)
class Layout:
    """The byte range of every tensor, in order of the names; gaps between them are padding."""

    tensors: tuple[TensorRange, ...]
    num_bytes: int

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Layout:
        """Lay out tensors by their names, dtypes and shapes."""
        ranges, end = [], 0
        for name in sorted(tensors):
            tensor = tensors[name]
            ranges.append(
                TensorRange(name, dtype_name(tensor), tuple(tensor.shape), end, tensor.nbytes)
            )
            end += -(-max(1, tensor.nbytes) // ALIGNMENT) * ALIGNMENT
        return cls(tuple(ranges), end)

    @cached_property
    def digest(self) -> str:
        """Digest of names, dtypes and shapes; nothing is sent unless it is equal on both sides."""
        described = [
            (tensor_range.name, tensor_range.dtype, tensor_range.shape)
            for tensor_range in self.tensors
        ]
        return sha256(json.dumps(described).encode()).hexdigest()

    @cached_property
    def _starts(self) -> list[int]:
        return [tensor_range.start for tensor_range in self.tensors]

    def buckets(self, *, max_bytes: int) -> list[range]:
        """Cut the buffer into ranges of at most `max_bytes`, a multiple of ALIGNMENT. A large
        tensor shares no bucket, so it is sent without a copy.
        """
        cuts, stops = [0], [*self._starts, self.num_bytes][1:]
        for tensor_range, stop in zip(self.tensors, stops, strict=True):
            is_large = tensor_range.num_bytes * SMALL_SHARE >= max_bytes
            if cuts[-1] < tensor_range.start and (is_large or stop - cuts[-1] > max_bytes):
                cuts.append(tensor_range.start)
            if is_large:
                cuts += [*range(tensor_range.start + max_bytes, stop, max_bytes), stop]
        bounds = dict.fromkeys([*cuts, self.num_bytes])
        return [range(*channel) for channel in pairwise(bounds)]

    def overlapping(self, bucket: range) -> Iterator[tuple[TensorRange, range]]:
        """Yield each tensor with bytes in a bucket, or that is empty and begins in it, with the
        range of those bytes.
        """
        first = max(0, bisect_right(self._starts, bucket.start) - 1)
        for tensor_range in self.tensors[first:]:
            if tensor_range.start >= bucket.stop:
                return
            overlap = range(
                max(tensor_range.start, bucket.start),
                min(tensor_range.start + tensor_range.num_bytes, bucket.stop),
            )
            if overlap or tensor_range.start >= bucket.start:
                yield tensor_range, overlap

    def gather(self, bucket: range, tensors: Mapping[str, Tensor], *, staging: Tensor) -> Tensor:
        """Return a bucket's bytes: a view if one tensor has them all, else gathered in `staging`.

        Args:
            bucket: An element of `buckets`.
            tensors: Of this layout, on the CPU, contiguous.
            staging: At least as large as the bucket.
        """
        for tensor_range, overlap in self.overlapping(bucket):
            data = (
                tensors[tensor_range.name]
                .reshape(-1)
                .view(torch.uint8)[
                    overlap.start - tensor_range.start : overlap.stop - tensor_range.start
                ]
            )
            if len(overlap) == len(bucket):
                return data
            staging[overlap.start - bucket.start : overlap.stop - bucket.start].copy_(data)
        return staging[: len(bucket)]

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """Return the tensors as views of a buffer."""
        return {
            tensor_range.name: buffer[
                tensor_range.start : tensor_range.start + tensor_range.num_bytes
            ]
            .view(getattr(torch, tensor_range.dtype))
            .reshape(tensor_range.shape)
            for tensor_range in self.tensors
        }


class BufferDigest:
    """Computes `artifact_writer.weights_digest` of the tensors in a buffer, bucket by bucket."""

    def __init__(self, layout: Layout, buffer: Tensor) -> None:
        self._layout, self._bytes = layout, buffer.numpy().data
        self._begun: TensorHash | None = None
        self._digests: dict[str, bytes] = {}

    def update(self, bucket: range) -> None:
        """Add the next bucket."""
        for tensor_range, overlap in self._layout.overlapping(bucket):
            if tensor_range.start >= bucket.start:
                self._begun = TensorHash(tensor_range.name, tensor_range.dtype, tensor_range.shape)
            if self._begun is None:  # the bucket holds only padding of a tensor that has ended
                continue
            self._begun.update(self._bytes[overlap.start : overlap.stop])
            if overlap.stop >= tensor_range.start + tensor_range.num_bytes:
                self._digests[tensor_range.name] = self._begun.digest()
                self._begun = None

    def value(self) -> bytes:
        """Return the digest once all buckets were added."""
        return combine_digests(self._digests)
