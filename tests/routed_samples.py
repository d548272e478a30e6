"""A mixture of experts computed by hand, with given experts or its own choice: the reference for
engines and trainer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engine_requests import plain_model
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import linear, silu

Experts = NDArray[np.integer]

ROUNDING = 1e-5
"""Difference of two log-probabilities in float32: of two experts that weigh the same within it,
a router may choose either."""


def mixed(
    layer: Any, hidden: Tensor, experts: Experts | None, begin: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Send each token through its experts, one token and one expert at a time.

    Args:
        layer: Router and experts, in float64.
        hidden: [tokens, width].
        experts: [tokens or fewer, top_k], given for the tokens from `begin` on. All others route by
            the layer's own weights.
        begin: A token's index.
    Returns:
        The outputs, the experts, and how much less probable each of them is than the router's own
        choice, as a difference of log-probabilities.
    """
    log_probabilities = (hidden @ layer.gate.weight.T).log_softmax(-1)
    own = torch.argsort(-log_probabilities, dim=-1)[:, : layer.gate.top_k]
    chosen = own.clone()
    if experts is not None:
        chosen[begin : begin + len(experts)] = torch.from_numpy(experts.astype(np.int64))
    outputs = torch.zeros_like(hidden)
    for token, some in enumerate(chosen.tolist()):
        weights = log_probabilities[token, some].softmax(-1)
        for expert, weight in zip(some, weights, strict=True):
            gate, up = layer.experts.gate_up_proj[expert].chunk(2)
            inner = silu(linear(hidden[token], gate)) * linear(hidden[token], up)
            outputs[token] += weight * linear(inner, layer.experts.down_proj[expert])
    return (
        outputs,
        chosen,
        log_probabilities.gather(-1, own) - log_probabilities.gather(-1, chosen),
    )


@dataclass
class Routing:
    """What each layer in turn chose.

    Attributes:
        experts: [tokens, top_k] of a layer.
        differences: Of the same shape: how much less probable each is than the router's own choice.
    """

    experts: list[Tensor] = field(default_factory=list)
    differences: list[Tensor] = field(default_factory=list)


@contextmanager
def routed(
    layers: Iterable[Any], experts: Experts | None = None, *, begin: int = 0
) -> Iterator[Routing]:
    """Compute a model's mixtures by hand, with given experts from a token on.

    Args:
        layers: The model's mixtures, in float64, in the order in which they run; a sequence at a
            time.
        experts: [tokens or fewer, layers, top_k]; none to route by the model's own weights.
        begin: The token that the first of `experts` belong to.
    """
    routing = Routing()

    def replaced(layer_index: int) -> Any:
        def forward(layer: Any, args: tuple[Tensor, ...], _: Tensor) -> Tensor:
            hidden = args[0].reshape(-1, args[0].shape[-1])
            given = None if experts is None else experts[:, layer_index]
            outputs, chosen, differences = mixed(layer, hidden, given, begin)
            routing.experts.append(chosen)
            routing.differences.append(differences)
            return outputs.view_as(args[0])

        return forward

    hooks = [
        layer.register_forward_hook(replaced(layer_index))
        for layer_index, layer in enumerate(layers)
    ]
    try:
        yield routing
    finally:
        for hook in hooks:
            hook.remove()


def forward(
    model: Any, tokens: NDArray[np.integer], routing: AbstractContextManager[Routing]
) -> tuple[Tensor, Routing]:
    """Return the logits of a sequence, and its routing."""
    with torch.no_grad(), routing as found:
        return model(torch.from_numpy(tokens.astype(np.int64))[None], use_cache=False).logits[
            0
        ], found


def routed_logprobs(
    model: Any,
    tokens: NDArray[np.integer],
    experts: Experts | None = None,
    *,
    temperature: float = 1.0,
) -> NDArray[np.float64]:
    """Compute the log-probability of each token of a sequence but the first in float64, the mixture
    by hand, the rest by transformers.

    Args:
        model: Qwen3-MoE of transformers, in float64; unchanged afterwards.
        tokens: The sequence.
        experts: [tokens - 1, layers, top_k]; none to route by the model's own weights. The last
            token always routes so.
        temperature: Divides the logits.
    """
    logits, _ = forward(model, tokens, routed(mixtures(model), experts))
    picked: NDArray[np.float64] = (
        (logits[:-1] / temperature)
        .log_softmax(-1)
        .gather(-1, torch.from_numpy(tokens[1:].astype(np.int64))[:, None])[:, 0]
        .numpy()
    )
    return picked


def mixtures(model: Any) -> list[Any]:
    return [layer.mlp for layer in model.model.layers]


def chosen_by(path: Path, tokens: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return the experts that a model's own weights choose for all tokens but the last: [tokens -
    1, layers, top_k]. Where two weigh the same but for rounding, another processor may choose
    otherwise: see `check_experts`."""
    model = plain_model(path)
    _, routing = forward(model, tokens, routed(mixtures(model)))
    chosen: NDArray[np.int64] = torch.stack(routing.experts, dim=1)[:-1].numpy()
    return chosen


def check_experts(
    experts: Experts | None, path: Path, tokens: NDArray[np.integer], *, begin: int = 0
) -> None:
    """Check that a model's own weights choose given experts.

    Args:
        experts: [tokens or fewer, layers, top_k], as an engine reported them.
        path: The model.
        tokens: The sequence.
        begin: The token that the first of `experts` belong to.
    """
    assert experts is not None
    model = plain_model(path)
    _, routing = forward(model, tokens, routed(mixtures(model), experts, begin=begin))
    check_choice(routing)


def check_choice(routing: Routing) -> None:
    """Check that given experts weigh as much as the router's own choice."""
    assert routing.differences
    for layer_index, differences in enumerate(routing.differences):
        odd = (differences.abs() > ROUNDING).any(-1).nonzero()[:, 0].tolist()
        assert not odd, f"layer {layer_index} chooses otherwise for tokens {odd}"
