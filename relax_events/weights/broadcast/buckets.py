"""A model's tensors as one row of bytes, cut into buckets: the same on both sides of a broadcast.
Pure arithmetic, but for the tensors.
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
from blake3 import blake3
from torch import Tensor

from relax_events.weights.artifact_writer import dtype_name
from relax_events.weights.manifest import tensor_header

ALIGNMENT = 64
"""Tensors begin at multiples of this, so that each can be looked at where it lies."""
SMALL_SHARE = 16
"""What has less than this part of a bucket is gathered in one with its neighbours."""


@dataclass(frozen=True, slots=True)
class TensorRange:
    """A tensor, and the bytes that it takes: from `start` on, `num_bytes` of them."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


@dataclass(frozen=True)
class Layout:
    """Where every tensor lies, in order of the names; between them are gaps that nobody reads."""

    tensors: tuple[TensorRange, ...]
    num_bytes: int

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Layout:
        """Lay out tensors, by their names, dtypes and shapes alone."""
        places, end = [], 0
        for name in sorted(tensors):
            tensor = tensors[name]
            places.append(TensorRange(name, dtype_name(tensor), tuple(tensor.shape), end, tensor.nbytes))
            end += -(-max(1, tensor.nbytes) // ALIGNMENT) * ALIGNMENT
        return cls(tuple(places), end)

    @cached_property
    def digest(self) -> str:
        """Names, dtypes and shapes in a word: equal on both sides, or nothing is sent."""
        described = [(place.name, place.dtype, place.shape) for place in self.tensors]
        return sha256(json.dumps(described).encode()).hexdigest()

    @cached_property
    def _starts(self) -> list[int]:
        return [place.start for place in self.tensors]

    def buckets(self, *, max_bytes: int) -> list[range]:
        """Cut the row into ranges of at most `max_bytes`, a multiple of ALIGNMENT; a large tensor
        shares none: it is sent from where it lies.
        """
        cuts, stops = [0], [*self._starts, self.num_bytes][1:]
        for place, stop in zip(self.tensors, stops, strict=True):
            is_large = place.num_bytes * SMALL_SHARE >= max_bytes
            if cuts[-1] < place.start and (is_large or stop - cuts[-1] > max_bytes):
                cuts.append(place.start)
            if is_large:
                cuts += [*range(place.start + max_bytes, stop, max_bytes), stop]
        bounds = dict.fromkeys([*cuts, self.num_bytes])
        return [range(*pair) for pair in pairwise(bounds)]

    def overlapping(self, bucket: range) -> Iterator[tuple[TensorRange, range]]:
        """Give the tensors that have bytes in a bucket, or are empty and begin in it, with which of
        the row's bytes those are.
        """
        first = max(0, bisect_right(self._starts, bucket.start) - 1)
        for place in self.tensors[first:]:
            if place.start >= bucket.stop:
                return
            held = range(
                max(place.start, bucket.start), min(place.start + place.num_bytes, bucket.stop)
            )
            if held or place.start >= bucket.start:
                yield place, held

    def gather(self, bucket: range, tensors: Mapping[str, Tensor], *, staging: Tensor) -> Tensor:
        """Give a bucket's bytes: where they lie, if one tensor has them all, else gathered in
        `staging`.

        Args:
            bucket: One of `buckets`.
            tensors: Of this layout, on the CPU, contiguous.
            staging: Bytes, at least as many as the bucket's.
        """
        for place, held in self.overlapping(bucket):
            data = (
                tensors[place.name]
                .reshape(-1)
                .view(torch.uint8)[held.start - place.start : held.stop - place.start]
            )
            if len(held) == len(bucket):
                return data
            staging[held.start - bucket.start : held.stop - bucket.start].copy_(data)
        return staging[: len(bucket)]

    def views(self, row: Tensor) -> dict[str, Tensor]:
        """Give the tensors as they lie in a row of bytes; nothing is copied."""
        return {
            place.name: row[place.start : place.start + place.num_bytes]
            .view(getattr(torch, place.dtype))
            .reshape(place.shape)
            for place in self.tensors
        }


class BufferDigest:
    """The digest of the tensors in a row of bytes, taken bucket by bucket; in the end
    `artifacts.transit_digest` of them.
    """

    def __init__(self, layout: Layout, row: Tensor) -> None:
        self._layout, self._bytes, self._digest = layout, row.numpy().data, blake3()

    def update(self, bucket: range) -> None:
        """Go on with the next bucket."""
        for place, held in self._layout.overlapping(bucket):
            if place.start >= bucket.start:
                self._digest.update(tensor_header(place.name, place.dtype, place.shape))
            self._digest.update(self._bytes[held.start : held.stop])

    def value(self) -> bytes:
        """Give the digest, once all buckets were taken."""
        return self._digest.digest()
