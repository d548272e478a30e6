"""Attention along the prefix tree of a row in few calls, for a CPU and short sequences: trees of
about one size are padded to one length and computed together.

    row       a a a a b b b b b c c c c c      three prompt groups with their samples
    together  a a a a .                        one call, with a mask for each
              b b b b b
              c c c c c
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import embedding, scaled_dot_product_attention

from relax_events.training.batch.prefix_tree import PrefixTree

MAX_TREE_TOKENS = 64
"""A tree of up to so many tokens is computed whole, a larger one run by run."""
LENGTH_STEP = 16
"""Queries and keys are padded to multiples of this."""


Block = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Cells of queries, and of what they attend to."""


class TreeBatches:
    """The attention of a row. One object serves all layers, and their backward passes."""

    def __init__(
        self, tree: PrefixTree, *, num_cells: int, num_heads: int, num_groups: int
    ) -> None:
        """Lay out what attends to what.

        Args:
            tree: Of the row.
            num_cells: Of the row; those after the last run of the tree are padding.
            num_heads: Of the queries.
            num_groups: Heads of the keys and values.
        """
        lasts = last_descendants(tree)
        by_size: dict[tuple[int, ...], list[Block]] = defaultdict(list)
        for block in _blocks(tree):
            by_size[_padded_size(block)].append(block)
        queries, keys = (
            [
                _pad([block[side] for block in blocks], size[side])
                for size, blocks in by_size.items()
            ]
            for side in (0, 1)
        )
        group_heads = num_heads // num_groups
        self._num_groups = num_groups
        self._masks = [
            torch.from_numpy(_mask(*cells, lasts=lasts).repeat(group_heads, 1)[:, None])
            for cells in zip(queries, keys, strict=True)
        ]
        self._num_queries = [one.size * num_groups for one in queries]
        self._num_keys = [one.size for one in keys]
        self._keys = torch.from_numpy(np.concatenate([one.ravel() for one in keys]))
        cells_of_rows = np.concatenate([_by_group(one, num_groups) for one in queries])
        rows_of_cells = np.zeros(num_cells * num_groups, np.int64)
        # in reverse, since padding comes after what it repeats
        rows_of_cells[cells_of_rows[::-1]] = np.arange(len(cells_of_rows))[::-1]
        is_padding = rows_of_cells[cells_of_rows] != np.arange(len(cells_of_rows))
        self._cells_of_rows, self._rows_of_cells, self._padding = map(
            torch.from_numpy, (cells_of_rows, rows_of_cells, np.flatnonzero(is_padding))
        )

    def __call__(
        self,
        query: Float[Tensor, "cells heads*width"],
        key: Float[Tensor, "cells groups*width"],
        value: Float[Tensor, "cells groups*width"],
        *,
        scale: float,
    ) -> Float[Tensor, "cells heads*width"]:
        """Return the attention's output; that of padding is arbitrary."""
        num_cells, num_groups = len(query), self._num_groups
        query = query.view(num_cells * num_groups, -1)
        queries = _Rows.apply(query, self._cells_of_rows, self._rows_of_cells, None)
        # A lookup, since its backward pass adds rows without sorting their numbers.
        pairs = embedding(self._keys, torch.cat((key, value), 1))
        outputs = []
        for mask, block_queries, pair in zip(
            self._masks,
            queries.split(self._num_queries),
            pairs.split(self._num_keys),
            strict=True,
        ):
            keys, values = pair.view(len(mask), mask.shape[3], 2, num_groups, -1).unbind(2)
            attended = scaled_dot_product_attention(
                block_queries.view(len(mask), num_groups, mask.shape[2], -1),
                keys.transpose(1, 2),
                values.transpose(1, 2),
                attn_mask=mask,
                scale=scale,
            )
            outputs.append(attended.reshape(-1, query.shape[1]))
        output: Tensor = _Rows.apply(
            torch.cat(outputs), self._rows_of_cells, self._cells_of_rows, self._padding
        )
        return output.view(num_cells, -1)


class _Rows(Function):
    """Chooses rows, each once or not at all: then the backward pass chooses them back."""

    @staticmethod
    def forward(
        ctx: Any, values: Tensor, rows: Tensor, back: Tensor, without: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(back, without)
        return values.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        back, without = ctx.saved_tensors
        chosen = gradient.index_select(0, back)
        return chosen if without is None else chosen.index_fill_(0, without, 0.0), None, None, None


def last_descendants(tree: PrefixTree) -> Int64[np.ndarray, " cells"]:
    """Return the last cell of each cell's subtree, in which it is what all cells attend to."""
    starts = np.append(0, tree.ends[:-1])
    lasts = np.full(tree.ends[-1], tree.ends[-1] - 1)
    for start, fork in zip(starts[::-1].tolist(), tree.forks[::-1].tolist(), strict=True):
        lasts[fork + 1 : start] = start - 1
    return lasts


def _blocks(tree: PrefixTree) -> Iterator[Block]:
    """Yield the cells of queries and keys that are computed together."""
    starts = np.append(0, tree.ends[:-1])
    roots = np.flatnonzero(tree.forks < 0)
    for first, after in zip(roots.tolist(), [*roots[1:].tolist(), len(starts)], strict=True):
        begin, end = int(starts[first]), int(tree.ends[after - 1])
        if end - begin <= MAX_TREE_TOKENS:
            yield np.arange(begin, end), np.arange(begin, end)
            continue
        path = np.zeros(0, np.int64)
        for run in range(first, after):
            queries = np.arange(starts[run], tree.ends[run])
            path = np.append(path[: np.searchsorted(path, tree.forks[run], "right")], queries)
            yield queries, path


def _by_group(cells: NDArray[np.int64], num_groups: int) -> NDArray[np.int64]:
    """Return the rows of the heads of cells, block by block, by group of heads."""
    return (cells[:, None] * num_groups + np.arange(num_groups)[:, None]).ravel()


def _padded_size(block: Sequence[NDArray[np.int64]]) -> tuple[int, ...]:
    return tuple(-(-len(cells) // LENGTH_STEP) * LENGTH_STEP for cells in block)


def _pad(cells: Sequence[NDArray[np.int64]], length: int) -> Int64[np.ndarray, "blocks length"]:
    steps = np.arange(length)
    return np.stack([block_cells[np.minimum(steps, len(block_cells) - 1)] for block_cells in cells])


def _mask(
    queries: Int64[np.ndarray, "blocks queries"],
    keys: Int64[np.ndarray, "blocks keys"],
    *,
    lasts: Int64[np.ndarray, " cells"],
) -> NDArray[np.float32]:
    after = queries[:, :, None]
    seen = (keys[:, None] <= after) & (after <= lasts[keys][:, None])
    seen[:, :, 1:] &= (keys[:, 1:] > keys[:, :-1])[:, None]
    return np.where(seen, np.float32(0), np.float32(-np.inf))
