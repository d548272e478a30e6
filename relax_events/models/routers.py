"""Record and replay the expert choices of a mixture of experts (rollout routing replay, R3).

A router's choice depends on a comparison. Engine and trainer round differently, so they send some
tokens to different experts: with the same weights, their log-probabilities then differ by far more
than rounding. With replay, the trainer uses the engine's experts and weighs them by its own current
probabilities; gradients flow through these weights as usual.

Source: "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers" (arXiv
2510.11370).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Integer
from numpy.typing import NDArray
from torch import Tensor, nn

from relax_events.errors import ConfigError
from relax_events.events.routed_experts import ExpertShape

ROUTER_ATTRIBUTES = ("top_k", "num_experts", "weight")
"""Attributes by which a router is recognised."""
REMEDY = "set model.routing_replay = 'none'"


class Routers:
    """All routers of a language model, in the order of its layers. They are unchanged outside
    `replay`.
    """

    def __init__(self, language: nn.Module, *, path: Path) -> None:
        """Find the routers.

        Args:
            language: Module that computes hidden states from embeddings.
            path: The model's folder, for errors.
        Raises:
            ConfigError: The model has no router, or routers with different numbers of experts.
        """
        self._path = path
        self._routers: list[Any] = [
            part
            for part in language.modules()
            if all(hasattr(part, name) for name in ROUTER_ATTRIBUTES)
        ]
        if not self._routers:
            raise ConfigError(
                "model.routing_replay needs a mixture of experts, but the "
                f"model in {path} is not one; {REMEDY}"
            )
        kinds = {(router.top_k, router.num_experts) for router in self._routers}
        if len(kinds) > 1:
            raise ConfigError(
                "model.routing_replay needs the same number of experts in all layers, but the "
                f"model in {path} has {sorted(kinds)}; {REMEDY}"
            )
        top_k, num_experts = kinds.pop()
        self.shape = ExpertShape(len(self._routers), top_k, num_experts)
        self._latest: list[Any] = [None] * len(self._routers)
        self._replayed: tuple[Tensor, Tensor] | None = None
        for layer, router in enumerate(self._routers):
            router.register_forward_hook(partial(self._on_forward, layer))

    def take_choices(self) -> Integer[np.ndarray, "tokens layers top_k"]:
        """Return and clear the choices of the last forward pass: for each token, padding included,
        rows concatenated.
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
        self._replayed = experts, mask[:, None]
        try:
            yield
        finally:
            self._replayed = None
            self.clear()

    @torch.no_grad()
    def require_known_rule(self, forward: Callable[[], object]) -> None:
        """Check in a forward pass that the routers weigh experts as `expert_weights` does.

        Raises:
            ConfigError: They do not.
        """
        forward()
        for router, (logits, weights, chosen) in zip(self._routers, self._latest, strict=True):
            if not torch.allclose(
                expert_weights(router, logits, chosen).to(weights.dtype), weights
            ):
                rule = (
                    "supports only routers that weigh the experts of highest softmax probability "
                    "by that probability"
                )
                raise ConfigError(
                    f"model.routing_replay {rule}, but {type(router).__name__} of the model "
                    f"in {self._path} does not; {REMEDY}"
                )
        self.clear()

    def _on_forward(
        self, layer: int, router: nn.Module, _: object, output: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        self._latest[layer] = output
        if self._replayed is None:
            return output
        logits, weights, routed = output
        experts, is_replayed = self._replayed
        chosen = torch.where(is_replayed, experts[:, layer].to(routed.dtype), routed)
        return logits, expert_weights(router, logits, chosen).to(weights.dtype), chosen


def expert_weights(
    router: Any, logits: Float[Tensor, "tokens experts"], chosen: Int[Tensor, "tokens top_k"]
) -> Float[Tensor, "tokens top_k"]:
    """Weigh chosen experts by the router's current probabilities, in the order of the choice."""
    weights = logits.softmax(-1, dtype=torch.float).gather(-1, chosen)
    return (
        weights / weights.sum(-1, keepdim=True)
        if getattr(router, "norm_topk_prob", True)
        else weights
    )


def split_rows(experts: NDArray[np.generic], num_rows: int) -> NDArray[np.generic]:
    """Split the result of `take_choices` by rows: [rows, length, layers, top_k]."""
    return experts.reshape(num_rows, -1, *experts.shape[1:])
