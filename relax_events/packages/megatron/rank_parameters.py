"""The parameters of one rank of a model that several ranks hold: gradients over all groups that
share them, AdamW, state, and the stream of weights.

    parameters            summed over                              counted in the norm
    matrices              ranks with the same part (data, context)   once each
    copies of a tied      those, after first and last stage           by the first stage
    embedding
    norms, router         those, after the tensor-parallel ranks,     by the first of these
                          which see other tokens or heads
    experts               ranks with the same experts                 once each
    towers                as norms                                    as norms
    frozen                not, and no optimizer holds them            never
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from torch import Tensor, nn
from torch import distributed as dist

from relax_events.api.training import Ranks, StateShard, StateSource, TrainerConfig
from relax_events.packages.megatron.layout import Shard, cut, full_shapes, holds_first_copy
from relax_events.packages.megatron.sizes import DecoderSizes
from relax_events.packages.megatron.slices import flat_pieces
from relax_events.training.backend.flat_adamw import MOMENTS
from relax_events.training.backend.flat_parameters import FlatPart
from relax_events.training.backend.parameter_store import ParameterStore

Parameters = Sequence[tuple[Shard, nn.Parameter]]


class RankParameters(ParameterStore):
    """One flat part of dense parameters, another of experts, and the frozen ones as they are.
    `reduce_gradients`, `normalise_gradients`, `update` and `load` are collective over all ranks.
    """

    def __init__(
        self,
        module: nn.Module,
        shards: Sequence[Shard],
        *,
        sizes: DecoderSizes,
        config: TrainerConfig,
        ranks: Ranks,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
        frozen: Collection[str] = (),
    ) -> None:
        """Move the parameters into flat tensors.

        Args:
            module: This rank's part, with its weights.
            shards: Its parameters.
            sizes: Of the decoder.
            config: AdamW's settings.
            ranks: All of them.
            shapes: Of what belongs to the state of the whole model; by default all its parameters.
            frozen: Names in transformers of the parameters that are not trained: each is saved by
                one of the ranks that hold it, and has no moments.
        """
        self._ranks = ranks
        self._shapes = full_shapes(sizes) if shapes is None else shapes
        parameters = dict(module.named_parameters())
        self._frozen_names = frozenset(frozen)
        self._frozen = {
            shard.name: (shard, parameters[shard.name].requires_grad_(False))
            for shard in shards
            if any(piece.name in self._frozen_names for piece in shard.pieces)
        }
        pairs = [
            (shard, parameters[shard.name]) for shard in shards if shard.name not in self._frozen
        ]
        dense = _in_order([pair for pair in pairs if not pair[0].is_expert])
        experts = [pair for pair in pairs if pair[0].is_expert]
        data = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self._dense = _flatten(dense, config=config, group=data)
        self._tied = [
            parameter
            for shard, parameter in dense
            if sizes.is_tied and ranks.topology.pipeline > 1 and _is_vocabulary(shard)
        ]
        self._num_plain = sum(not (one.is_copy or one.is_replicated) for one, _ in dense)
        self._first_replicated = sum(not one.is_replicated for one, _ in dense)
        self._parts: list[tuple[FlatPart, Parameters]] = [(self._dense, dense)]
        if experts:
            group = parallel_state.get_expert_data_parallel_group()
            self._parts.append((_flatten(experts, config=config, group=group), experts))
        self._tensor = parallel_state.get_tensor_model_parallel_group()
        self._step = torch.zeros((), dtype=torch.float32)

    def zero_gradients(self) -> None:
        """Set the gradients to zero."""
        for part, _ in self._parts:
            part.zero_gradients()

    def reduce_gradients(self, ranks: Ranks) -> None:
        """Sum the gradients over the ranks that share parameters."""
        del ranks  # each parameter has its own
        if self._tensor.size() > 1:
            replicated = self._dense.select_gradients(
                self._first_replicated, len(self._parts[0][1])
            )
            dist.all_reduce(replicated, group=self._tensor)
        if self._tied:
            self._sum_tied()
        for part, _ in self._parts:
            part.reduce_gradients()

    def _sum_tied(self) -> None:
        """Sum the gradients of an embedding that the last pipeline stage has a copy of."""
        group: Any = parallel_state.get_embedding_group()
        for index, (_, parameter) in enumerate(self._parts[0][1]):
            if any(parameter is tied for tied in self._tied):
                dist.all_reduce(self._dense.select_gradients(index, index + 1), group=group)

    def normalise_gradients(self, normaliser: float) -> float:
        """Divide the gradients, and return their norm over all ranks."""
        squares = 0.0
        for part, parameters in self._parts:
            part.normalise_gradients(normaliser)
            if part is not self._dense:
                squares += part.squares(0, len(parameters))
                continue
            squares += part.squares(0, self._num_plain)
            if self._ranks.at.tensor == 0:
                squares += part.squares(self._first_replicated, len(parameters))
        return math.sqrt(float(self._ranks.all_gather(np.array([squares])).sum()))

    def update(self, *, learning_rate: float, gradient_scale: float) -> None:
        """Scale the gradients, take one AdamW step, and zero the gradients."""
        for part, _ in self._parts:
            part.update(learning_rate=learning_rate, gradient_scale=gradient_scale)
        self._step += 1

    def memory(self, *, with_gradients: bool = False) -> tuple[list[Tensor], list[Tensor]]:
        """Return tensors with all memory of the trained parameters; see `ParameterStore`."""
        memories = [part.memory(with_gradients=with_gradients) for part, _ in self._parts]
        kept, rebuilt = zip(*memories, strict=True)
        return list(chain.from_iterable(kept)), list(chain.from_iterable(rebuilt))

    def rebuild(self, *, with_gradients: bool = False) -> None:
        """Compute what was not kept; local to the rank."""
        for part, _ in self._parts:
            part.rebuild(with_gradients=with_gradients)

    def tensors(self) -> dict[str, Tensor]:
        """Return what is whole on each rank: the optimizer's steps, of matrices and of vectors
        where there are some.
        """
        kinds = {min(len(shape), 2) for shape in self._shapes.values()}
        return {f"optimizer.step.{index}": self._step for index in range(len(kinds))}

    def shards(self) -> list[StateShard]:
        """Return the pieces that this rank saves: `model.<name>`, `exp_avg.<name>`,
        `exp_avg_sq.<name>`.
        """
        return [piece for shard, piece in self._pieces() if self._saves(shard)]

    def copies(self) -> list[StateShard]:
        """Return the pieces that this rank holds too and others save."""
        return [piece for shard, piece in self._pieces() if not self._saves(shard)]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all tensors in pieces."""
        return {
            f"{kind}.{name}": shape
            for kind in ("model", *MOMENTS)
            for name, shape in self._shapes.items()
            if kind == "model" or name not in self._frozen_names
        }

    def _saves(self, shard: Shard) -> bool:
        """Return whether this rank saves its slice of a parameter."""
        at = self._ranks.at
        if shard.name in self._frozen:
            return holds_first_copy(shard, at)
        return not shard.is_copy and not (shard.is_replicated and at.tensor)

    def _pieces(self) -> Iterator[tuple[Shard, StateShard]]:
        for part, parameters in self._parts:
            for index, (shard, _) in enumerate(parameters):
                first, values = (
                    part.starts[index],
                    {"model": part.masters, **part.optimizer.moments},
                )
                for piece in flat_pieces(shard, first=first, start=part.start, end=part.end):
                    for kind, flat in values.items():
                        yield (
                            shard,
                            StateShard(
                                name=f"{kind}.{piece.name}",
                                global_shape=self._shapes[piece.name],
                                offset=piece.offset,
                                tensor=piece.of(flat),
                            ),
                        )
        for shard, parameter in self._frozen.values():
            for held in shard.pieces:
                yield (
                    shard,
                    StateShard(
                        name=f"model.{held.name}",
                        global_shape=self._shapes[held.name],
                        offset=tuple(start for start, _ in held.source),
                        tensor=cut(parameter.detach(), held.target),
                    ),
                )

    def _load_optimizer(self, state: StateSource) -> None:
        for part, _ in self._parts:
            part.optimizer.load(state)

    def _share_loaded(self) -> None:
        for part, _ in self._parts:
            part.share_masters()


def _flatten(parameters: Parameters, *, config: TrainerConfig, group: Any) -> FlatPart:
    named = {shard.name: parameter for shard, parameter in parameters}
    return FlatPart(named, config=config, group=group)


def _in_order(parameters: Parameters) -> Parameters:
    """Sort parameters: divided by the tensor-parallel ranks, copies of a tied embedding, matrices
    that all hold whole, vectors.
    """

    def kind(pair: tuple[Shard, nn.Parameter]) -> tuple[bool, bool, bool]:
        shard, parameter = pair
        return parameter.ndim < 2, shard.is_replicated, shard.is_copy

    return sorted(parameters, key=kind)


def _is_vocabulary(shard: Shard) -> bool:
    return shard.name.endswith(("embedding.word_embeddings.weight", "output_layer.weight"))
