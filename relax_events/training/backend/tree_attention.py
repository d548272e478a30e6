"""Attention along the prefix tree of a row: a token attends to the earlier tokens of its own
sequence, which may stand in several places of the row.

Each run is computed alone, over the keys of its sequence, so nothing is computed between sequences
and no mask is as large as the row. transformers' attention `sdpa` becomes this one in forward
passes that get a tree.
"""

from __future__ import annotations

from collections.abc import Sequence
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
CELLS_OF_A_CALL = 4096
"""Pairs of a query and a key that take about as long on a CPU as one more call of the attention."""
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
        self._parts = [
            (
                first,
                end,
                list(join_short(tree.queries(first, end, max_tokens=longest), max_cells=saved)),
            )
            for first, end in parts
        ]
        single = [one for _, _, blocks in self._parts for one in blocks if len(one.pieces) == 1]
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
        outputs, offset = [], 0
        for first, end, blocks in self._parts:
            done = first
            for block in blocks:
                start = offset + block.start - first
                own = query[:, :, start : start + block.stop - block.start]
                outputs.append(
                    self._attend(
                        own, _select(key, block.keys), _select(value, block.keys), block, scale
                    )
                )
                done = block.stop
            offset += end - first
            if done < end:  # padding attends to nothing
                outputs.append(torch.zeros_like(query[:, :, offset - (end - done) : offset]))
        return torch.cat(outputs, 2)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, block: Block, scale: float | None
    ) -> Tensor:
        is_square = len(block.pieces) == 1 and query.shape[2] == key.shape[2]
        output: Tensor = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=None if is_square else self._mask_of(block, query, key.shape[2]),
            is_causal=is_square,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return output

    def _mask_of(self, block: Block, query: Tensor, num_keys: int) -> Any:
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


def _select(values: Tensor, keys: Sequence[tuple[int, int]]) -> Tensor:
    """Return ranges of cells; one range is a view."""
    parts = [values[:, :, start:end] for start, end in keys]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **given: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend along a tree, where one is given and the model's attention is no more than that."""
    tree: TreeAttention | None = given.pop(ARGUMENT, None)
    if tree is None or any(given.get(name) is not None for name in NOT_SUPPORTED):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **given)
    output = tree(query, key, value, scale=given.get("scaling"))
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register("sdpa", _attention)
