"""Replays the engine's choice of experts in megatron-core's routers (rollout routing replay, R3).

The choices of a micro-batch go with its row: cut for the context-parallel ranks, then along the
sequence for the tensor-parallel ones. A router weighs the chosen experts by its own current
probabilities; tokens without a recorded choice it routes itself. `models.routers` does the same for
models of transformers, and names the source.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int, Int64, Integer
from torch import Tensor, nn

from relax_events.packages.megatron.row import Row

TopK = Callable[..., tuple[Tensor, Tensor]]


class Choices(NamedTuple):
    """The recorded experts of one layer, for a rank's tokens of a micro-batch.

    Attributes:
        chosen: For each token.
        routed: Indices of the tokens without a recorded choice.
    """

    chosen: Integer[Tensor, "tokens top_k"]
    routed: Int64[Tensor, " routed"]


class LayerReplay:
    """What one layer's router asks in place of megatron-core's own `RouterReplay`.

    A layer that is computed again in the backward pass routes as in the forward pass: its choices
    are kept until then. Both passes take the micro-batches in the same order.
    """

    def __init__(self) -> None:
        self.choices: Choices | None = None
        self.is_recomputed = False
        self.kept: deque[Choices | None] = deque()

    def get_replay_topk(
        self,
        scores: Float[Tensor, "tokens experts"],
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: TopK,
    ) -> tuple[Float[Tensor, "tokens top_k"], Int[Tensor, "tokens top_k"]]:
        """Return the scores and numbers of each token's experts. The name is megatron-core's."""
        choose = partial(default_compute_topk, num_groups=num_groups, group_topk=group_topk)
        if (choices := self._take_choices()) is None:
            return choose(scores, topk)
        chosen = choices.chosen.to(torch.int64)
        if len(choices.routed) and group_topk:  # megatron-core's choice by groups takes all tokens
            chosen.index_copy_(0, choices.routed, choose(scores, topk)[1][choices.routed])
        elif len(choices.routed):
            alone = scores.detach().index_select(0, choices.routed)
            chosen.index_copy_(0, choices.routed, choose(alone, topk)[1])
        return scores.gather(1, chosen), chosen

    def _take_choices(self) -> Choices | None:
        if not self.is_recomputed:
            return self.choices
        if torch.is_grad_enabled():  # of the backward pass: the forward pass has none here
            return self.kept.popleft()
        self.kept.append(self.choices)
        return self.choices


class RoutingReplay:
    """The routers of this rank's layers.

    Args:
        layers: megatron-core's layers that have experts.
        tensor: Rank and number of the tensor-parallel ranks, which divide the sequence.
    """

    def __init__(self, layers: Iterable[nn.Module], *, tensor: tuple[int, int]) -> None:
        self._tensor = tensor
        self._layers: list[tuple[int, LayerReplay]] = []
        for layer in layers:
            part: Any = layer
            part.mlp.router.router_replay = replay = LayerReplay()
            self._layers.append((part.layer_number - 1, replay))

    def begin(self, *, is_recomputed: bool) -> None:
        """Begin to run micro-batches; `is_recomputed`: the layers are computed again in their
        backward pass.
        """
        for _, replay in self._layers:
            replay.is_recomputed = is_recomputed
            replay.kept.clear()

    @contextmanager
    def replay(self, row: Row, device: torch.device) -> Iterator[None]:
        """Replay a row's choices in the forward pass of this context."""
        if row.experts is None or row.is_replayed is None:
            yield
            return
        index, number = self._tensor
        size = len(row.token_indices) // number
        cells = row.token_indices[index * size : (index + 1) * size]
        chosen = torch.from_numpy(row.experts[cells]).to(device)
        routed = torch.from_numpy(np.flatnonzero(~row.is_replayed[cells])).to(device)
        for layer, replay in self._layers:
            replay.choices = Choices(chosen[:, layer], routed)
        try:
            yield
        finally:
            for _, replay in self._layers:
                replay.choices = None
