"""Adapters (LoRA) in megatron-core's linear layers: each adds `scaling * B A x` to its output, as
peft's layers do in transformers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn
from torch.nn.functional import linear

from relax_events.api.training import LoRAConfig
from relax_events.models.adapters import sample_adapter
from relax_events.packages.megatron.adapter_layout import AdaptedPart
from relax_events.packages.megatron.layout import Shard, cut
from relax_events.packages.megatron.sizes import DecoderSizes


class _Matrices(nn.Module):
    """A and B of one linear layer of transformers, this rank's parts."""

    def __init__(self, part: AdaptedPart, rank: int, tensor: int, like: Tensor) -> None:
        super().__init__()
        columns = part.num_columns if part.splits_rows else part.num_columns // tensor
        rows = part.num_rows // tensor if part.splits_rows else part.num_rows
        self.A = nn.Parameter(like.new_zeros(rank, columns))
        self.B = nn.Parameter(like.new_zeros(rows, rank))


class _AddToRows:
    """Adds to the output of a layer of which each rank has some rows: of several fused linear
    layers, group by group.
    """

    def __init__(self, widths: Sequence[int], num_groups: int, scaling: float, tensor: Any) -> None:
        """Take the rows of each fused linear layer in one of this rank's groups."""
        self._widths, self._num_groups = widths, num_groups
        self._scaling, self._tensor = scaling, tensor

    def __call__(self, module: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Any]) -> Any:
        hidden, result = inputs[0], output[0]
        present: dict[int, _Matrices] = dict(
            zip(module.adapted, module.adapters.values(), strict=True)
        )
        low = linear(hidden, torch.cat([one.A for one in present.values()]))
        if self._tensor.size() > 1:  # each rank has some of the tokens
            low = gather_from_sequence_parallel_region(low)
        parts = dict(zip(present, low.chunk(len(present), dim=-1), strict=True))
        rows = result.shape[:-1]
        added = [
            linear(parts[position], present[position].B).view(*rows, self._num_groups, width)
            if position in present
            else result.new_zeros(*rows, self._num_groups, width)
            for position, width in enumerate(self._widths)
        ]
        return result + self._scaling * torch.cat(added, -1).flatten(-2), output[1]


class _AddToColumns:
    """Adds to the output of a layer of which each rank has some columns."""

    def __init__(self, scaling: float, tensor: Any) -> None:
        self._scaling, self._tensor = scaling, tensor

    def __call__(self, module: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Any]) -> Any:
        (matrices,) = module.adapters.values()
        low = linear(inputs[0], matrices.A)
        if self._tensor.size() > 1:
            low = reduce_scatter_to_sequence_parallel_region(low)
        return output[0] + self._scaling * linear(low, matrices.B), output[1]


def add_adapters(
    chunk: nn.Module,
    parts: Iterable[AdaptedPart],
    *,
    sizes: DecoderSizes,
    lora: LoRAConfig,
    tensor: Any,
) -> None:
    """Add adapters without values to a chunk of layers; its other parameters are frozen.

    Args:
        chunk: Of megatron-core's layers, on its device.
        parts: Its linear layers with adapters.
        sizes: Of the decoder.
        lora: Rank and scale.
        tensor: The tensor-parallel ranks.
    """
    chunk.requires_grad_(False)
    num_groups, size = sizes.num_groups // tensor.size(), tensor.size()
    queries = sizes.num_heads // sizes.num_groups * sizes.head_dim
    for ours, group in groupby(parts, key=lambda part: part.ours):
        layer_parts = list(group)
        layer: Any = chunk.get_submodule(ours)
        like = next(layer.parameters())
        layer.adapted = [part.position for part in layer_parts]
        layer.adapters = nn.ModuleDict(
            {part.name: _Matrices(part, lora.rank, size, like) for part in layer_parts}
        )
        add: Any
        if not layer_parts[0].splits_rows:
            add = _AddToColumns(lora.scaling, tensor)
        elif ours.endswith("linear_qkv"):
            widths = (queries, sizes.head_dim, sizes.head_dim)
            add = _AddToRows(widths, num_groups, lora.scaling, tensor)
        else:
            add = _AddToRows((sizes.mlp_size // size,) * 2, 1, lora.scaling, tensor)
        layer.register_forward_hook(add)


@torch.no_grad()
def initialise_adapters(
    module: nn.Module,
    shards: Iterable[Shard],
    shapes: dict[str, tuple[int, ...]],
    *,
    seed: int,
) -> None:
    """Give adapters the values that they have in backend `torch` for this seed.

    Args:
        module: This rank's part.
        shards: Its adapters.
        shapes: Of all adapters of the model.
        seed: Of the run.
    """
    parameters = dict(module.named_parameters())
    parameters_by_name = {
        shard.pieces[0].name: (shard.pieces[0], parameters[shard.name]) for shard in shards
    }
    generator = torch.Generator().manual_seed(seed)
    for name in sorted(shapes):
        if ".lora_B." in name:
            continue
        values = sample_adapter(shapes[name], generator)  # on every rank, or the next would differ
        if name in parameters_by_name:
            piece, parameter = parameters_by_name[name]
            parameter.copy_(cut(values, piece.source))
