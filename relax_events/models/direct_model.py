"""Prefills and decodes with a model's own weights and torch alone, where its layers are of the
plain form: RMSNorm, grouped-query attention with rotary positions, a gated MLP.

transformers' modules take longer for a small step than what they compute. Here the same operations
run in the same order, so the logits have the same bits: a model is computed this way only if those
of a probe do. Every other model is computed by its modules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.cache_utils import Cache

from relax_events.models.layers import grouped_sdpa

PLAIN_MODELS = ("llama", "qwen2", "qwen3")
"""Model types whose layers have the plain form."""


@dataclass(frozen=True, slots=True)
class Projection:
    """A linear layer; loading other weights changes its tensors in place."""

    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, layer: nn.Module) -> Projection:
        """Return that of a linear layer."""
        return cls(layer.get_parameter("weight"), getattr(layer, "bias", None))

    def __call__(self, values: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows other"]:
        """Return the layer's output."""
        return linear(values, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMSNorm as transformers computes it: in float32, multiplied in the weights' dtype."""

    weight: Tensor
    eps: float

    @classmethod
    def of(cls, layer: Any) -> Norm:
        """Return that of a module."""
        return cls(layer.weight, layer.variance_epsilon)

    def scale(self, values: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows width"]:
        """Divide each row by the root of its mean square."""
        wide = values.float()
        factors = wide.pow(2).mean(-1, keepdim=True).add_(self.eps).rsqrt_()
        return (wide * factors).to(values.dtype)

    def __call__(self, values: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows width"]:
        """Return the layer's output."""
        return self.scale(values).mul_(self.weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """The parts of a decoder layer."""

    attention: Any
    query: Projection
    key: Projection
    value: Projection
    output: Projection
    query_norm: Norm | None
    key_norm: Norm | None
    gate: Projection
    up: Projection
    down: Projection
    activation: Callable[[Tensor], Tensor]
    before_attention: Norm
    before_mlp: Norm

    @classmethod
    def of(cls, layer: Any) -> Layer:
        """Return the parts of a module's layer."""
        attention, mlp = layer.self_attn, layer.mlp
        has_norms = hasattr(attention, "q_norm")
        return cls(
            attention=attention,
            query=Projection.of(attention.q_proj),
            key=Projection.of(attention.k_proj),
            value=Projection.of(attention.v_proj),
            output=Projection.of(attention.o_proj),
            query_norm=Norm.of(attention.q_norm) if has_norms else None,
            key_norm=Norm.of(attention.k_norm) if has_norms else None,
            gate=Projection.of(mlp.gate_proj),
            up=Projection.of(mlp.up_proj),
            down=Projection.of(mlp.down_proj),
            activation=mlp.act_fn,
            before_attention=Norm.of(layer.input_layernorm),
            before_mlp=Norm.of(layer.post_attention_layernorm),
        )

    @property
    def num_key_heads(self) -> int:
        """Heads of the keys."""
        return len(self.key.weight) // int(self.attention.head_dim)

    def queries_and_keys(
        self, hidden: Float[Tensor, "rows length hidden"]
    ) -> Float[Tensor, "rows length heads width"]:
        """Return the heads of the queries, then the heads of the keys, before rotation."""
        queries, keys, width = self.query(hidden), self.key(hidden), self.attention.head_dim
        together = torch.cat((queries, keys), -1).view(*hidden.shape[:2], -1, width)
        if self.query_norm is None or self.key_norm is None:
            return together
        # One division for both, which have one width.
        scaled, num_heads = self.query_norm.scale(together), queries.shape[-1] // width
        scaled[:, :, :num_heads].mul_(self.query_norm.weight)
        scaled[:, :, num_heads:].mul_(self.key_norm.weight)
        return scaled


def is_plain(language_model: Any, *, attention: str) -> bool:
    """Return whether a model's layers have the plain form, with none of them wrapped.

    Args:
        language_model: A decoder without its output head.
        attention: Name of the implementation that it must have.
    """
    config = language_model.config
    if config.model_type not in PLAIN_MODELS:
        return False
    linears = (part for name, part in language_model.named_modules() if name.endswith("_proj"))
    return config._attn_implementation == attention and all(  # noqa: SLF001
        type(part) is nn.Linear for part in linears
    )


class DirectModel:
    """A decoder's forward pass up to its output head."""

    def __init__(self, language_model: Any) -> None:
        """Take the parts of a model for which `is_plain` is true."""
        self._embed, self._rotate = language_model.embed_tokens, language_model.rotary_emb
        self._layers = [Layer.of(layer) for layer in language_model.layers]
        self._norm = Norm.of(language_model.norm)

    def __call__(
        self,
        tokens: Int[Tensor, "rows length"],
        positions: Int[Tensor, "rows length"],
        cache: Cache,
        mask: Float[Tensor, "rows 1 1 seen"] | None = None,
    ) -> Float[Tensor, "rows length hidden"]:
        """Return the hidden states after the last norm.

        Args:
            tokens: Whole prompts, or the newest token of each row.
            positions: Index of each token in its row.
            cache: The earlier tokens, to which `tokens` are added.
            mask: What is added to the attention's scores of one token; None for whole prompts.
        """
        hidden = self._embed(tokens)
        cos, sin = (part[:, :, None] for part in self._rotate(hidden, positions))
        for index, layer in enumerate(self._layers):
            normed = layer.before_attention(hidden)
            heads = _rotate(layer.queries_and_keys(normed), cos, sin).transpose(1, 2)
            num_queries = heads.shape[1] - layer.num_key_heads
            values = layer.value(normed).view(*tokens.shape, -1, heads.shape[3]).transpose(1, 2)
            attended, _ = grouped_sdpa(
                layer.attention,
                heads[:, :num_queries],
                *cache.update(heads[:, num_queries:], values, index),
                mask,
                scaling=layer.attention.scaling,
            )
            hidden = layer.output(attended.flatten(2)).add_(hidden)
            normed = layer.before_mlp(hidden)
            gated = layer.activation(layer.gate(normed)).mul_(layer.up(normed))
            hidden = layer.down(gated).add_(hidden)
        return self._norm(hidden)


def _rotate(
    heads: Float[Tensor, "rows length heads width"],
    cos: Float[Tensor, "rows length 1 width"],
    sin: Float[Tensor, "rows length 1 width"],
) -> Float[Tensor, "rows length heads width"]:
    """Apply rotary positions."""
    half = heads.shape[-1] // 2
    turned = torch.cat((-heads[..., half:], heads[..., :half]), -1)
    return (heads * cos).add_(turned.mul_(sin))
