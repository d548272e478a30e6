"""Gathers the weights of a model that several ranks hold on rank 0's CPU, in Hugging Face names:
each rank sends its pieces of one part of the weights after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch import distributed as dist

from relax_events.api.training import Ranks
from relax_events.packages.megatron.layout import (
    Piece,
    ShardsOf,
    cut,
    full_shapes,
    holds_first_copy,
    rank_shards,
)
from relax_events.packages.megatron.sizes import DecoderSizes
from relax_events.training.backend.weight_stream import split_into_buckets


@dataclass(frozen=True, slots=True)
class _Held:
    """A piece that a rank sends, and the parameter that holds it there."""

    rank: int
    parameter: str
    piece: Piece


class WeightGathering:
    """See the module's docstring."""

    def __init__(
        self,
        module: nn.Module,
        sizes: DecoderSizes,
        *,
        ranks: Ranks,
        shards_of: ShardsOf = rank_shards,
    ) -> None:
        """Take the table of all ranks.

        Args:
            module: This rank's part of the model.
            sizes: Of the decoder.
            ranks: All of them.
            shards_of: Yields what a rank holds of a published version.
        """
        self._parameters = dict(module.named_parameters())
        self._rank = ranks.rank
        self._shapes = full_shapes(sizes, shards_of)
        self._held: dict[str, list[_Held]] = {name: [] for name in self._shapes}
        topology = ranks.topology
        for rank in range(topology.num_ranks) if ranks.rank == 0 else (ranks.rank,):
            at = topology.at(rank)
            for shard in shards_of(sizes, topology, at):
                if holds_first_copy(shard, at):
                    for piece in shard.pieces:
                        self._held[piece.name].append(_Held(rank, shard.name, piece))

    def buckets(self, *, max_bytes: int, dtype: torch.dtype) -> Iterator[dict[str, Tensor]]:
        """Yield the weights; see `TrainerBackend.weight_buckets`."""
        on_meta = {
            name: torch.empty(shape, dtype=dtype, device="meta")
            for name, shape in self._shapes.items()
        }
        for names in split_into_buckets(on_meta, max_bytes=max_bytes):
            by_rank: dict[int, list[_Held]] = {}
            for name in names:
                for held in self._held[name]:
                    by_rank.setdefault(held.rank, []).append(held)
            if self._rank:
                if self._rank in by_rank:
                    dist.send(self._flatten(by_rank[self._rank]), dst=0)
                yield {}
                continue
            bucket = {name: torch.empty(self._shapes[name], dtype=dtype) for name in names}
            for rank, pieces in sorted(by_rank.items()):
                self._fill(bucket, pieces, rank)
            yield bucket

    def _flatten(self, pieces: list[_Held]) -> Tensor:
        return torch.cat(
            [
                cut(self._parameters[held.parameter].detach(), held.piece.target).flatten()
                for held in pieces
            ]
        )

    def _fill(self, bucket: dict[str, Tensor], pieces: list[_Held], rank: int) -> None:
        """Fill in what a rank holds of a part of the weights."""
        targets = [cut(bucket[held.piece.name], held.piece.source) for held in pieces]
        sizes = [target.numel() for target in targets]
        if rank == 0:
            values = self._flatten(pieces)
        else:
            parameter = next(iter(self._parameters.values()))
            values = torch.empty(sum(sizes), dtype=targets[0].dtype, device=parameter.device)
            dist.recv(values, src=rank)
        for target, part in zip(targets, values.cpu().split(sizes), strict=True):
            target.copy_(part.view(target.shape))
