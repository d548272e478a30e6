"""A mixture of experts computed by hand, with given experts or its own choice: the reference for
engines and trainer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from engine_requests import plain_model
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import linear, silu


def mixed(layer: Any, hidden: Tensor, chosen: Tensor | None, top_k: int) -> tuple[Tensor, Tensor]:
    """Send each token through its experts, one token and one expert at a time; return the outputs
    and the choice."""
    probabilities = torch.exp(hidden @ layer.gate.weight.T)
    probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    chosen = torch.argsort(-probabilities, dim=-1)[:, :top_k] if chosen is None else chosen
    outputs = torch.zeros_like(hidden)
    for token, experts in enumerate(chosen.tolist()):
        weights = probabilities[token, experts]
        for expert, weight in zip(experts, weights / weights.sum(), strict=True):
            gate, up = layer.experts.gate_up_proj[expert].chunk(2)
            inner = silu(linear(hidden[token], gate)) * linear(hidden[token], up)
            outputs[token] += weight * linear(inner, layer.experts.down_proj[expert])
    return outputs, chosen


def routed_logprobs(
    model: Any,
    tokens: NDArray[np.integer],
    experts: NDArray[np.generic] | None = None,
    *,
    temperature: float = 1.0,
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Compute a sequence's log-probabilities in float64, the mixture by hand, the rest by
    transformers.

    Args:
        model: Qwen3-MoE of transformers, in float64; unchanged afterwards.
        tokens: The sequence.
        experts: [tokens - 1, layers, top_k]; none to route by the model's own weights. The last
            token always routes so.
        temperature: Divides the logits.
    Returns:
        The log-probability of each token but the first, and the experts that each token went
        through.
    """
    top_k, found = model.config.num_experts_per_tok, []

    def replaced(layer_index: int) -> Any:
        def forward(module: Any, args: tuple[Tensor, ...], _: Tensor) -> Tensor:
            hidden = args[0].reshape(-1, args[0].shape[-1])
            free, own = mixed(module, hidden, None, top_k)
            if experts is None:
                found.append(own)
                return free.view_as(args[0])
            given = torch.cat(
                [torch.from_numpy(experts[:, layer_index].astype(np.int64)), own[-1:]]
            )
            found.append(given)
            return mixed(module, hidden, given, top_k)[0].view_as(args[0])

        return forward

    hooks = [
        layer.mlp.register_forward_hook(replaced(layer_index))
        for layer_index, layer in enumerate(model.model.layers)
    ]
    with torch.no_grad():
        logits = (
            model(torch.from_numpy(tokens.astype(np.int64))[None], use_cache=False).logits[0]
            / temperature
        )
    for hook in hooks:
        hook.remove()
    picked = (
        logits[:-1]
        .log_softmax(-1)
        .gather(-1, torch.from_numpy(tokens[1:].astype(np.int64))[:, None])[:, 0]
    )
    return picked.numpy(), torch.stack(found, dim=1).numpy()


def chosen_by(path: Path, tokens: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return the experts that a model's own weights choose for all tokens but the last."""
    return routed_logprobs(plain_model(path), tokens)[1][:-1]
