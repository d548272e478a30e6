"""The row of a micro-batch whose token sequences have common prefixes, which stand in it once.

The row holds what each sequence adds to those before it, its run, in sorted order: then each
sequence has its longest common prefix with the one before it.

    sequences   p p p a a u b b        runs   p p p a a u b b | v c | d d d
                p p p a a v c          ends   8, 10, 13
                p p p d d d            forks  -1, 4, 2     the cell after which a run branches off

A token attends to the earlier tokens of its own sequence alone, so its hidden state equals that of
the sequence alone, within rounding. Pure functions, numpy alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int64
from numpy.typing import NDArray


class Queries(NamedTuple):
    """Consecutive tokens of a row with what they attend to: causally, where the last of them sees
    all keys.

    Attributes:
        start: First cell.
        stop: After the last one.
        keys: Ranges of cells, in the order of the sequence; the last one ends at `stop`.
    """

    start: int
    stop: int
    keys: Sequence[tuple[int, int]]


class Block(NamedTuple):
    """Consecutive queries that are computed together, over the keys of all of them.

    Attributes:
        pieces: The queries.
        keys: Ranges of cells, ascending.
        num_cells: Pairs of a query and a key that are none of its own.
    """

    pieces: Sequence[Queries]
    keys: Sequence[tuple[int, int]]
    num_cells: int = 0

    @property
    def start(self) -> int:
        """First cell of the queries."""
        return self.pieces[0].start

    @property
    def stop(self) -> int:
        """After the last one."""
        return self.pieces[-1].stop

    def seen(self) -> Bool[np.ndarray, "queries keys"]:
        """Return which key each query attends to."""
        keys = np.concatenate([np.arange(*bounds) for bounds in self.keys])
        bounds = np.array([bounds for piece in self.pieces for bounds in piece.keys])
        pieces = np.repeat(np.arange(len(self.pieces)), [len(one.keys) for one in self.pieces])
        # +1 where a range of a piece begins, -1 after its end: the sum so far is 1 within it
        changes = np.zeros((len(self.pieces), len(keys) + 1), np.int8)
        np.add.at(changes, (pieces, np.searchsorted(keys, bounds[:, 0])), 1)
        np.add.at(changes, (pieces, np.searchsorted(keys, bounds[:, 1])), -1)
        of_pieces = changes.cumsum(1, dtype=np.int8)[:, :-1].astype(bool)
        seen = of_pieces.repeat([piece.stop - piece.start for piece in self.pieces], 0)
        seen &= keys <= np.arange(self.start, self.stop)[:, None]
        return seen


def join_short(queries: Iterable[Queries], *, max_cells: int) -> Iterator[Block]:
    """Yield queries in blocks: many short ones cost more in calls than in what they compute.

    Args:
        queries: In the order of the row.
        max_cells: Pairs of a query and a key that may be computed beyond need to save one call.
    """
    block: Block | None = None
    for piece in queries:
        if block is not None:
            joined = _join(block, piece)
            if joined.num_cells - block.num_cells <= max_cells:
                block = joined
                continue
            yield block
        block = Block([piece], piece.keys)
    if block is not None:
        yield block


def _join(block: Block, piece: Queries) -> Block:
    keys: list[tuple[int, int]] = []
    for start, end in sorted([*block.keys, *piece.keys]):
        if keys and start <= keys[-1][1]:
            keys[-1] = keys[-1][0], max(end, keys[-1][1])
        else:
            keys.append((start, end))
    needed = (block.stop - block.start) * count_cells(block.keys) - block.num_cells
    needed += (piece.stop - piece.start) * count_cells(piece.keys)
    computed = (piece.stop - block.start) * count_cells(keys)
    return Block([*block.pieces, piece], keys, computed - needed)


def count_cells(ranges: Sequence[tuple[int, int]]) -> int:
    """Return the number of cells of disjoint ranges."""
    return sum(end - start for start, end in ranges)


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """The runs of a row; see the module's docstring. Cells after the last run are padding."""

    ends: Int64[np.ndarray, " runs"]
    forks: Int64[np.ndarray, " runs"]

    @classmethod
    def of_sequences(cls, ends: NDArray[np.int64]) -> PrefixTree:
        """Return the tree of sequences that share nothing."""
        return cls(ends, np.full(len(ends), -1))

    def queries(self, first: int, last: int, *, max_tokens: int | None = None) -> Iterator[Queries]:
        """Yield the tokens of a part of the row, padding left out.

        Args:
            first: Its first cell.
            last: After its last one.
            max_tokens: Of one piece of what attends to tokens before it; by default a run is one
                piece.
        """
        ends = self.ends.tolist()
        start = 0
        keys_of_runs: list[list[tuple[int, int]]] = []
        owners = np.searchsorted(self.ends, self.forks, side="right").tolist()
        for end, fork, owner in zip(ends, self.forks.tolist(), owners, strict=True):
            before = [] if fork < 0 else _cut(keys_of_runs[owner], fork + 1)
            keys_of_runs.append([*before, (start, end)])
            begin, stop = max(start, first), min(end, last)
            size = max(stop - begin, 1)
            if before or begin > start:
                size = min(size, max_tokens or size)
            for piece in range(begin, stop, size):
                piece_end = min(stop, piece + size)
                yield Queries(piece, piece_end, _merge([*before, (start, piece_end)]))
            start = end


def _cut(keys: Sequence[tuple[int, int]], end: int) -> list[tuple[int, int]]:
    """Return the keys of a run up to a cell of its own."""
    return [*keys[:-1], (keys[-1][0], end)]


def _merge(keys: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join ranges that follow one another in the row."""
    merged = [keys[0]]
    for start, end in keys[1:]:
        if start == merged[-1][1]:
            merged[-1] = merged[-1][0], end
        else:
            merged.append((start, end))
    return merged
