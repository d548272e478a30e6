"""Decodes with a model's own weights and torch alone, where its layers are of the plain form:
RMSNorm, grouped-query attention with rotary positions, a gated MLP.

transformers' modules take longer for a small step than what they compute. Here the same operations
run in the same order, so the logits have the same bits: a model is decoded this way only if those
of a probe do. Every other model is decoded by its modules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import linear

from relax_events.engines.transformers.kv_cache import RowCache
from relax_events.engines.transformers.layers import ATTENTION_IMPLEMENTATION, grouped_sdpa

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
        """Return those of a module."""
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
        self, hidden: Float[Tensor, "rows hidden"]
    ) -> Float[Tensor, "rows heads width"]:
        """Return the heads of the queries, and after them those of the keys, before rotation."""
        queries, keys, width = self.query(hidden), self.key(hidden), self.attention.head_dim
        together = torch.cat((queries, keys), -1).view(len(hidden), -1, width)
        if self.query_norm is None or self.key_norm is None:
            return together
        # One division for both, which have one width.
        scaled, num_heads = self.query_norm.scale(together), queries.shape[-1] // width
        scaled[:, :num_heads].mul_(self.query_norm.weight)
        scaled[:, num_heads:].mul_(self.key_norm.weight)
        return scaled


class DirectDecoding:
    """A decoder's forward pass of one token in each row."""

    def __init__(self, language_model: Any) -> None:
        """Take the parts of a model for which `is_plain` is true."""
        self._embed, self._rotate = language_model.embed_tokens, language_model.rotary_emb
        self._layers = [Layer.of(layer) for layer in language_model.layers]
        self._norm = Norm.of(language_model.norm)

    @staticmethod
    def is_plain(language_model: Any) -> bool:
        """Return whether a model's layers have the plain form, with none of them wrapped."""
        config = language_model.config
        if config.model_type not in PLAIN_MODELS:
            return False
        linears = (
            part
            for name, part in language_model.named_modules()
            if name.endswith("_proj") or type(part) is nn.Linear
        )
        return config._attn_implementation == ATTENTION_IMPLEMENTATION and all(  # noqa: SLF001
            type(part) is nn.Linear for part in linears
        )

    def __call__(
        self,
        tokens: Int[Tensor, " rows"],
        positions: Int[Tensor, " rows"],
        cache: RowCache,
        mask: Float[Tensor, "rows 1 1 seen"],
    ) -> Float[Tensor, "rows hidden"]:
        """Return the hidden states of one more token in each row, after the last norm.

        Args:
            tokens: The newest token of each row.
            positions: Index of each token in its row.
            cache: The earlier tokens, with `begin_step` called; `tokens` are added.
            mask: What is added to the attention's scores.
        """
        hidden = self._embed(tokens)
        rotation = self._rotate(hidden, positions[:, None])
        for index, layer in enumerate(self._layers):
            normed = layer.before_attention(hidden)
            rotated = _rotate(layer.queries_and_keys(normed), *rotation)
            num_queries = rotated.shape[1] - layer.num_key_heads
            keys, values = cache.update(
                rotated[:, num_queries:, None],
                layer.value(normed).view(len(tokens), -1, 1, rotated.shape[2]),
                index,
            )
            attended, _ = grouped_sdpa(
                layer.attention,
                rotated[:, :num_queries, None],
                keys,
                values,
                mask,
                scaling=layer.attention.scaling,
            )
            hidden = layer.output(attended.flatten(1)).add_(hidden)
            normed = layer.before_mlp(hidden)
            gated = layer.activation(layer.gate(normed)).mul_(layer.up(normed))
            hidden = layer.down(gated).add_(hidden)
        return self._norm(hidden)


def _rotate(
    heads: Float[Tensor, "rows heads width"],
    cos: Float[Tensor, "rows 1 width"],
    sin: Float[Tensor, "rows 1 width"],
) -> Float[Tensor, "rows heads width"]:
    """Apply rotary positions."""
    half = heads.shape[-1] // 2
    turned = torch.cat((-heads[..., half:], heads[..., :half]), -1)
    return (heads * cos).add_(turned.mul_(sin))
