"""Modules of our own in megatron-core's layers: a norm and an attention, which its layers for
machines without transformer-engine lack; and a critic's head.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from relax_events.packages.megatron.row import context_parts
from relax_events.training.backend.tree_attention import TreeAttention
from relax_events.training.batch.prefix_tree import PrefixTree


class RankNorm(torch.nn.RMSNorm):
    """RMSNorm that may see a part of the sequence; its gradients are then summed over the
    tensor-parallel ranks.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: object) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)


class ValueHead(torch.nn.Module):
    """A critic's scalar head. As a norm it may see a part of the sequence; its gradients are then
    summed over the tensor-parallel ranks.
    """

    def __init__(self, config: Any, hidden_size: int) -> None:
        super().__init__()
        on_cpu = config.use_cpu_initialization
        tensor_options: dict[str, Any] = {
            "dtype": config.params_dtype,
            "device": torch.device("cpu" if on_cpu else torch.cuda.current_device()),
        }
        self.weight = torch.nn.Parameter(torch.zeros(hidden_size, **tensor_options))
        self.bias = torch.nn.Parameter(torch.zeros(1, **tensor_options))

    def forward(self, hidden: Float[Tensor, "tokens hidden"]) -> Float[Tensor, " tokens"]:
        """Return a value for each hidden state, in at least float32."""
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        # as backend `torch` does: a matrix product's order of summation depends on its rows
        return (hidden.to(dtype) * self.weight.to(dtype)).sum(-1) + self.bias.to(dtype)


class PackedAttention(MegatronModule):  # type: ignore[misc]  # megatron-core has no types
    """Causal attention in each sequence of a packed row, whose prefixes may be shared.

    The row's tree comes in the argument that megatron-core calls `attention_mask`. Each sequence is
    computed alone, so its result does not depend on its neighbours, and nothing is computed for
    padding. With context parallelism a rank holds two parts of the row, counted from both of its
    ends, and gathers the keys and values of all.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **_: object,
    ) -> None:
        """Take what megatron-core's layers pass to every attention."""
        del layer_number, attn_mask_type, attention_type, attention_dropout, cp_comm_type
        super().__init__(config=config)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(
            required_pgs=["tp", "cp"]
        )
        self._context = groups.cp
        self._scale = softmax_scale

    def forward(
        self,
        query: Float[Tensor, "tokens 1 heads width"],
        key: Float[Tensor, "row_tokens 1 groups width"],
        value: Float[Tensor, "row_tokens 1 groups width"],
        attention_mask: Int[Tensor, "2 runs"],
        attn_mask_type: Any = None,
        attention_bias: Any = None,
        packed_seq_params: Any = None,
    ) -> Float[Tensor, "tokens 1 features"]:
        """Return the attention's output for this rank's tokens.

        Args:
            query: Of this rank's tokens.
            key: Likewise.
            value: Likewise.
            attention_mask: From `encode_tree`, on the CPU; padding follows the last run.
            attn_mask_type: Unused, as the following are.
            attention_bias: Unused.
            packed_seq_params: Unused.
        """
        del attn_mask_type, attention_bias, packed_seq_params
        num_tokens, num_parts = len(query), self._context.size()
        if num_parts > 1:
            key, value = (self._gather(part) for part in (key, value))
        parts = context_parts(
            num_tokens * num_parts, num_parts=num_parts, index=self._context.rank()
        )
        attend = _build_attention(attention_mask.numpy().tobytes(), tuple(parts), query.device)
        by_head = [part.permute(1, 2, 0, 3) for part in (query, key, value)]
        attended = attend(by_head[0], by_head[1], by_head[2], scale=self._scale)
        output = attended.permute(2, 0, 1, 3).reshape(num_tokens, 1, -1)
        if num_parts > 1:
            # a rank that holds nothing but padding takes part in the backward pass all the same:
            # the others wait there for its share of the gradients of keys and values
            output = output + 0 * (key[0, 0, 0, 0] + value[0, 0, 0, 0])
        return output

    def _gather(self, part: Tensor) -> Tensor:
        """Return the parts of all ranks, in the order of the row."""
        size = self._context.size()
        gathered = gather_from_sequence_parallel_region(part.contiguous(), group=self._context)
        halves = gathered.chunk(2 * size)
        return torch.cat([*halves[0::2], *reversed(halves[1::2])])

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Return nothing: it has no weights."""
        del prefix, sharded_offsets, metadata
        return {}


def encode_tree(tree: PrefixTree) -> Int[Tensor, "2 runs"]:
    """Return a tree as a tensor on the CPU, which megatron-core passes to each layer."""
    return torch.from_numpy(np.stack([tree.ends, tree.forks]))


@lru_cache(maxsize=8)
def _build_attention(
    tree: bytes, parts: tuple[tuple[int, int], ...], device: torch.device
) -> TreeAttention:
    """Return the attention of a row, which its layers have in common."""
    ends, forks = np.frombuffer(tree, np.int64).reshape(2, -1)
    return TreeAttention(PrefixTree(ends, forks), parts, device=device)
