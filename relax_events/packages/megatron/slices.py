"""Cuts flat slices of parameters into rectangles of Hugging Face tensors. Pure functions.

The optimizer's state of a rank is a slice of a flat tensor, in which parameters lie one after the
other. A slice may begin and end in the middle of a row, so a matrix' part of it is at most three
rectangles: the rest of a row, whole rows, the beginning of a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from torch import Tensor

from relax_events.packages.megatron.layout import Box, Shard, cut


@dataclass(frozen=True, slots=True)
class FlatPiece:
    """A rectangle of a Hugging Face tensor in a flat slice.

    Attributes:
        name: In transformers.
        offset: Of the rectangle in the tensor.
        start: Where the rows of the parameter that hold it begin, in the slice.
        rows: Shape of these rows.
        inner: The rectangle in these rows.
        has_expert: Whether the tensor has one more dimension, of the experts.
    """

    name: str
    offset: tuple[int, ...]
    start: int
    rows: tuple[int, ...]
    inner: Box
    has_expert: bool

    def of(self, values: Tensor) -> Tensor:
        """Return the rectangle of a flat slice as a view."""
        rows = values[self.start : self.start + prod(self.rows)].view(self.rows)
        piece = cut(rows, self.inner)
        return piece[None] if self.has_expert else piece


def flat_pieces(shard: Shard, *, first: int, start: int, end: int) -> Iterator[FlatPiece]:
    """Yield the rectangles of a parameter that lie in a slice.

    Args:
        shard: The parameter.
        first: Where it begins in the flat tensor.
        start: Where the slice begins.
        end: Where it ends.
    """
    low, high = max(first, start), min(first + prod(shard.shape), end)
    for at, box in _rectangles(shard.shape, low - first, high - first):
        shape = tuple(stop - begin for begin, stop in box)
        for piece in shard.pieces:
            inner = _intersect(box, piece.target)
            if inner is None:
                continue
            moved = tuple(
                begin + inside[0] - target[0]
                for (begin, _), inside, target in zip(
                    piece.source[-len(inner) :], inner, piece.target, strict=True
                )
            )
            has_expert = len(piece.source) > len(inner)
            offset = (piece.source[0][0], *moved) if has_expert else moved
            local = tuple(
                (begin - corner, stop - corner)
                for (begin, stop), (corner, _) in zip(inner, box, strict=True)
            )
            yield FlatPiece(piece.name, offset, first + at - start, shape, local, has_expert)


def _rectangles(shape: tuple[int, ...], low: int, high: int) -> Iterator[tuple[int, Box]]:
    """Yield the rectangles of a range of a flat tensor, and where each begins."""
    if low >= high:
        return
    if len(shape) == 1:
        yield low, ((low, high),)
        return
    width = prod(shape[1:])
    while low < high:
        row, column = divmod(low, width)
        num_rows = (high - low) // width if column == 0 else 0
        if num_rows:
            yield low, ((row, row + num_rows), *((0, size) for size in shape[1:]))
            low += num_rows * width
        else:
            stop = min(width, column + high - low)
            for at, box in _rectangles(shape[1:], column, stop):
                yield row * width + at, ((row, row + 1), *box)
            low += stop - column


def _intersect(one: Box, other: Box) -> Box | None:
    box = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return box if all(start < end for start, end in box) else None
