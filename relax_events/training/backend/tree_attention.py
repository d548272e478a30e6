"""Attention along the prefix tree of a row: a token attends to the earlier tokens of its own
sequence, which may stand in several places of the row.

Each run is computed alone, over the keys of its sequence, so nothing is computed between sequences
and no mask is as large as the row. transformers' attention `sdpa` becomes this one in forward
passes that get a tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from relax_events.training.batch.prefix_tree import PrefixTree

MAX_MASK_ROWS = 512
"""Queries at once where a mask is needed, so that a run's mask grows with its sequence alone."""
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
        self._parts = [
            (
                end - first,
                [
                    (queries.start - first, queries.stop - first, queries.keys)
                    for queries in tree.queries(
                        first, end, max_tokens=MAX_MASK_ROWS if self._takes_mask else None
                    )
                ],
            )
            for first, end in parts
        ]
        sizes = [
            (stop - start, _count(keys)) for _, part in self._parts for start, stop, keys in part
        ]
        self._mask_shape = [max(values, default=0) for values in zip(*sizes, strict=True)] or [0, 0]
        self._mask: Tensor | None = None

    def __call__(
        self,
        query: Float[Tensor, "1 heads own width"],
        key: Float[Tensor, "1 groups row width"],
        value: Float[Tensor, "1 groups row width"],
        *,
        scale: float | None = None,
    ) -> Float[Tensor, "1 heads own width"]:
        """Return the attention's output; zeros for padding."""
        outputs, first = [], 0
        for size, pieces in self._parts:
            done = 0
            for start, stop, keys in pieces:
                own = query[:, :, first + start : first + stop]
                outputs.append(self._attend(own, _select(key, keys), _select(value, keys), scale))
                done = stop
            if done < size:  # padding attends to nothing
                outputs.append(torch.zeros_like(query[:, :, first + done : first + size]))
            first += size
        return torch.cat(outputs, 2)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Attend causally; the queries are those of the last keys."""
        num_queries, num_keys = query.shape[2], key.shape[2]
        is_square = num_queries == num_keys
        mask = None if is_square else self._lower_right(num_queries, num_keys, query)
        output: Tensor = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=is_square,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return output

    def _lower_right(self, num_queries: int, num_keys: int, like: Tensor) -> Any:
        """Return the mask of queries that are the last of the keys: a corner of the largest one,
        which all pieces and layers share.
        """
        if not self._takes_mask:
            return causal_lower_right(num_queries, num_keys)
        rows, columns = self._mask_shape
        if self._mask is None or self._mask.dtype != like.dtype:
            hidden = torch.full(
                (rows, columns), float("-inf"), dtype=like.dtype, device=like.device
            )
            self._mask = hidden.triu_(columns - rows + 1)
        return self._mask[rows - num_queries :, columns - num_keys :]


def _count(keys: Sequence[tuple[int, int]]) -> int:
    return sum(end - start for start, end in keys)


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
