"""Record and replay the expert choices of a mixture of experts (rollout routing replay, R3).

A router's choice depends on a comparison. Engine and trainer round differently, so they send some
tokens to different experts: with the same weights, their log-probabilities then differ by far more
than rounding. With replay, the trainer uses the engine's experts and weighs them by its own current
probabilities; gradients flow through these weights as usual.

Source: "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers" (arXiv
2510.11370).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Integer
from numpy.typing import NDArray
from torch import Tensor, nn

from relax_events.errors import ConfigError
from relax_events.events.routed_experts import ExpertShape

ROUTER_ATTRIBUTES = ("top_k", "num_experts", "weight")
"""Attributes by which a router is recognised."""
SCORINGS = ("softmax", "sigmoid")
"""How routers make scores of logits: of Qwen3 and most others, of DeepSeek-V3 and GLM-4.5."""
REMEDY = "set model.routing_replay = 'none'"


class RoutedLayer(NamedTuple):
    """What a layer's router did.

    Attributes:
        logits: With gradient.
        chosen: The experts that each token went to.
        scoring: One of `SCORINGS`.
    """

    logits: Float[Tensor, "cells experts"]
    chosen: Int[Tensor, "cells top_k"]
    scoring: str


class Routers:
    """All routers of a language model, in the order of its layers. They are unchanged outside
    `replay`.
    """

    def __init__(
        self, language: nn.Module, *, path: Path, wanted_by: str = "model.routing_replay"
    ) -> None:
        """Find the routers.

        Args:
            language: Module that computes hidden states from embeddings.
            path: The model's folder, for errors.
            wanted_by: The setting that needs them, for errors.
        Raises:
            ConfigError: The model has no router, or routers with different numbers of experts.
        """
        self._path, self._wanted_by = path, wanted_by
        self._remedy = REMEDY if wanted_by == "model.routing_replay" else f"leave {wanted_by} out"
        self._routers: list[Any] = [
            part
            for part in language.modules()
            if all(hasattr(part, name) for name in ROUTER_ATTRIBUTES)
        ]
        if not self._routers:
            raise ConfigError(
                f"{wanted_by} needs a mixture of experts, but the model in {path} is not one; "
                f"{self._remedy}"
            )
        kinds = {(router.top_k, router.num_experts) for router in self._routers}
        if len(kinds) > 1:
            raise ConfigError(
                f"{wanted_by} needs the same number of experts in all layers, but the model in "
                f"{path} has {sorted(kinds)}; {self._remedy}"
            )
        top_k, num_experts = kinds.pop()
        self.shape = ExpertShape(len(self._routers), top_k, num_experts)
        self._scorings = [SCORINGS[0]] * len(self._routers)
        self._latest: list[Any] = [None] * len(self._routers)
        self._replayed: tuple[Tensor, Tensor] | None = None
        self._routed: list[RoutedLayer] | None = None
        for layer, router in enumerate(self._routers):
            router.register_forward_hook(partial(self._on_forward, layer))

    def take_choices(self) -> Integer[np.ndarray, "tokens layers top_k"]:
        """Return and clear the choices of the last forward pass without gradients: for each token,
        padding included, rows concatenated.
        """
        chosen = torch.stack([output[2] for output in self._latest], dim=1)
        self.clear()
        return self.shape.compact(chosen.cpu().numpy())

    def clear(self) -> None:
        """Clear the choices of the last forward pass."""
        self._latest = [None] * len(self._routers)

    @contextmanager
    def replay(
        self,
        chosen: Integer[np.ndarray, "tokens layers top_k"],
        is_replayed: Bool[np.ndarray, " tokens"],
    ) -> Iterator[None]:
        """Replay choices in the forward passes of this context; for tokens without one the routers
        choose.

        Args:
            chosen: The choice for each token of the forward pass, padding included, rows
                concatenated.
            is_replayed: True for each token that has a recorded choice.
        """
        device = self._routers[0].weight.device
        experts, mask = (torch.from_numpy(array).to(device) for array in (chosen, is_replayed))
        with self._replaying((experts, mask[:, None])):
            yield

    @contextmanager
    def _replaying(self, replayed: tuple[Tensor, Tensor] | None) -> Iterator[None]:
        before, self._replayed = self._replayed, replayed
        try:
            yield
        finally:
            self._replayed = before
            self.clear()

    def bind(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls another with the choices that are replayed now, none
        included, whenever it is called: a backward pass computes layers again after `replay`.
        """
        return self._replaying(self._replayed)(forward)

    @contextmanager
    def recording(self) -> Iterator[list[RoutedLayer]]:
        """Yield a list to which each layer of the forward passes in this context adds its logits,
        with gradient, and the experts that its tokens went to. Layers that are computed again in a
        backward pass add nothing.
        """
        routed: list[RoutedLayer] = []
        self._routed = routed
        try:
            yield routed
        finally:
            self._routed = None

    @torch.no_grad()
    def require_known_rule(self, forward: Callable[[], object]) -> None:
        """Find out in a forward pass how the routers make scores, so that they weigh experts as
        `expert_weights` does. How they choose does not matter: by groups, or with a bias.

        Raises:
            ConfigError: They weigh experts in another way.
        """
        forward()
        for layer, router in enumerate(self._routers):
            logits, weights, chosen = self._latest[layer]
            fitting = (
                scoring
                for scoring in SCORINGS
                if torch.allclose(
                    expert_weights(router, logits, chosen, scoring).to(weights.dtype), weights
                )
            )
            if (scoring := next(fitting, None)) is None:
                raise ConfigError(
                    f"{self._wanted_by} supports only routers that weigh experts by their softmax "
                    f"probability or sigmoid, but {type(router).__name__} of the model in "
                    f"{self._path} does not; {self._remedy}"
                )
            self._scorings[layer] = scoring
        self.clear()

    def _on_forward(
        self, layer: int, router: nn.Module, _: object, output: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        if not torch.is_grad_enabled():  # else it would hold activations, those computed again too
            self._latest[layer] = output
        logits, weights, chosen = output
        if self._replayed is not None:
            experts, is_replayed = self._replayed
            chosen = torch.where(is_replayed, experts[:, layer].to(chosen.dtype), chosen)
            weights = expert_weights(router, logits, chosen, self._scorings[layer]).to(
                weights.dtype
            )
        if self._routed is not None:
            self._routed.append(RoutedLayer(logits, chosen, self._scorings[layer]))
        return logits, weights, chosen


def expert_weights(
    router: Any,
    logits: Float[Tensor, "tokens experts"],
    chosen: Int[Tensor, "tokens top_k"],
    scoring: str = SCORINGS[0],
) -> Float[Tensor, "tokens top_k"]:
    """Weigh chosen experts by the router's current scores, in the order of the choice: their
    share of the chosen ones' sum where the router normalises, times its factor.
    """
    scores = logits.float()
    scores = scores.sigmoid() if scoring == "sigmoid" else scores.softmax(-1)
    weights = scores.gather(-1, chosen)
    if getattr(router, "norm_topk_prob", True):
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * getattr(router, "routed_scaling_factor", 1.0)


def expert_probabilities(
    logits: Float[Tensor, "tokens experts"], scoring: str
) -> Float[Tensor, "tokens experts"]:
    """Return the probabilities of all experts, in at least float32: sigmoids are divided by their
    sum.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if scoring == "softmax":
        return wide.softmax(-1)
    scores = wide.sigmoid()
    return scores / scores.sum(-1, keepdim=True)


def imbalance(
    routed: Sequence[RoutedLayer],
    *,
    cells: Int[Tensor, " tokens"],
    num_tokens: Int[Tensor, " paths"],
) -> Float[Tensor, " paths"]:
    """Return the load-balancing loss of each path of the samples: for each layer, the number of
    experts times the sum over experts of the share of tokens that went there and the mean
    probability of going there; then the mean over layers. It is `top_k` where all experts are used
    alike.

    A path's value depends on its own tokens alone, so it does not depend on how samples are packed,
    spread over ranks or cut into passes. The gradient flows through the probabilities.

    Args:
        routed: Of each layer; the gradient flows through the logits.
        cells: The cell of each token of the concatenated paths.
        num_tokens: Of each path.
    Source: Switch Transformers, equations 4 to 6 (arXiv 2101.03961), with top_k choices; by
    sequence as DeepSeek-V3's, equations 17 to 20 (arXiv 2412.19437).
    """
    owners = torch.arange(len(num_tokens), device=cells.device).repeat_interleave(num_tokens)
    layers = []
    for logits, chosen, scoring in routed:
        probabilities = expert_probabilities(logits, scoring)
        num_experts = probabilities.shape[-1]
        means = probabilities.new_zeros(len(num_tokens), num_experts).index_add(
            0, owners, probabilities[cells]
        )
        counts = num_tokens.to(probabilities.dtype)[:, None]
        numbered = owners[:, None] * num_experts + chosen[cells]
        used = numbered.flatten().bincount(minlength=means.numel()).view_as(means)
        layers.append((used / counts * means / counts).sum(-1) * num_experts)
    return torch.stack(layers).mean(0)


def split_rows(experts: NDArray[np.generic], num_rows: int) -> NDArray[np.generic]:
    """Split the result of `take_choices` by rows: [rows, length, layers, top_k]."""
    return experts.reshape(num_rows, -1, *experts.shape[1:])
