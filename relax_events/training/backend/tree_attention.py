"""Attention along the prefix tree of a row: a token attends to the earlier tokens of its own
sequence, which may stand in several places of the row.

Each run is computed alone, over the keys of its sequence, so nothing is computed between sequences
and no mask is as large as the row. transformers' attention `sdpa` becomes this one in forward
passes that get a tree.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from relax_events.training.batch.prefix_tree import Block, PrefixTree, count_cells, join_short

MAX_MASK_ROWS = 512
"""Queries at once where a mask is needed, so that a run's mask grows with its sequence alone."""
CELLS_OF_A_CALL = 1024
"""Pairs of a query and a key that take about as long on a CPU as one more call of the attention,
forward and backward: measured from 4 heads of width 16 to 16 of width 128.
"""
NOT_SUPPORTED = ("sliding_window", "softcap", "s_aux", "position_bias", "cache")
"""Arguments of attentions that this one does not compute."""
ARGUMENT = "prefix_tree"
"""Name of the tree among the arguments of a forward pass."""


class TreeAttention:
    """Attention of a part of a row. One object serves all layers, and their backward passes."""

    def __init__(
        self, tree: PrefixTree, parts: Sequence[tuple[int, int]], *, device: torch.device
    ) -> None:
        """Lay out what attends to what.

        Args:
            tree: Of the row.
            parts: First cell, and end, of each part of the row whose queries are given, in their
                order.
            device: A GPU has kernels for queries that are the last of their keys; elsewhere they
                take a mask.
        """
        self._takes_mask = device.type != "cuda"
        longest, saved = (MAX_MASK_ROWS, CELLS_OF_A_CALL) if self._takes_mask else (None, -1)
        self._blocks: list[Block | None] = []
        self._query_sizes: list[int] = []
        for first, end in parts:
            queries = tree.queries(first, end, max_tokens=longest)
            blocks = list(join_short(queries, max_cells=saved))
            done = blocks[-1].stop if blocks else first
            self._blocks += [*blocks, None]
            self._query_sizes += [*(block.stop - block.start for block in blocks), end - done]
        present_blocks = [block for block in self._blocks if block is not None]
        cuts = sorted(
            {0} | {cell for block in present_blocks for bounds in block.keys for cell in bounds}
        )
        self._key_sizes = np.diff(cuts).tolist()
        self._segments = [
            [] if block is None else _find_segments(block.keys, cuts) for block in self._blocks
        ]
        single = [block for block in present_blocks if len(block.pieces) == 1]
        self._mask_shape = (
            max((one.stop - one.start for one in single), default=0),
            max((count_cells(one.keys) for one in single), default=0),
        )
        self._masks: dict[int | None, Tensor] = {}

    def __call__(
        self,
        query: Float[Tensor, "1 heads own width"],
        key: Float[Tensor, "1 groups row width"],
        value: Float[Tensor, "1 groups row width"],
        *,
        scale: float | None = None,
    ) -> Float[Tensor, "1 heads own width"]:
        """Return the attention's output; zeros for padding."""
        queries = query.split(self._query_sizes, 2)
        sizes = [*self._key_sizes, key.shape[2] - sum(self._key_sizes)]
        keys, values = key.split(sizes, 2), value.split(sizes, 2)
        # Slices instead would each write a gradient as long as the row in the backward pass.
        outputs = [
            torch.zeros_like(part)  # padding attends to nothing
            if block is None
            else self._attend(
                part, _select(keys, segments), _select(values, segments), block, scale
            )
            for part, block, segments in zip(queries, self._blocks, self._segments, strict=True)
        ]
        return torch.cat(outputs, 2)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, block: Block, scale: float | None
    ) -> Tensor:
        is_square = len(block.pieces) == 1 and query.shape[2] == key.shape[2]
        output: Tensor = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=None if is_square else self._build_mask(block, query, key.shape[2]),
            is_causal=is_square,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return output

    def _build_mask(self, block: Block, query: Tensor, num_keys: int) -> Any:
        """Return the mask of a block, the same for all layers. The queries of a single piece are
        the last of its keys: their mask is a corner of the largest such mask.
        """
        num_queries = query.shape[2]
        if not self._takes_mask:
            return causal_lower_right(num_queries, num_keys)
        name = block.start if len(block.pieces) > 1 else None
        mask = self._masks.get(name)
        if mask is None or mask.dtype != query.dtype:
            rows, columns = self._mask_shape
            seen = np.tri(rows, columns, columns - rows, bool) if name is None else block.seen()
            allowed = torch.from_numpy(seen).to(query.device)
            mask = torch.where(allowed, 0.0, float("-inf")).to(query.dtype)
            self._masks[name] = mask
        return mask if name is not None else mask[-num_queries:, -num_keys:]


def _find_segments(ranges: Iterable[tuple[int, int]], cuts: Sequence[int]) -> list[int]:
    """Return which segments between cuts make up ranges that begin and end at cuts."""
    return [
        segment
        for start, end in ranges
        for segment in range(bisect_left(cuts, start), bisect_left(cuts, end))
    ]


def _select(parts: Sequence[Tensor], segments: Sequence[int]) -> Tensor:
    """Return segments of a row; one segment is a view."""
    chosen = [parts[segment] for segment in segments]
    return chosen[0] if len(chosen) == 1 else torch.cat(chosen, 2)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **arguments: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend along a tree, where one is given and the model's attention is no more than that."""
    tree: TreeAttention | None = arguments.pop(ARGUMENT, None)
    if tree is None or any(arguments.get(name) is not None for name in NOT_SUPPORTED):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **arguments)
    output = tree(query, key, value, scale=arguments.get("scaling"))
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register("sdpa", _attention)
