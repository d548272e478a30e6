"""A decoder's forward pass by torch alone, for training and scoring on a CPU, where its layers are
of the plain form: RMSNorm, grouped-query attention with rotary positions, a gated MLP.

For a small model transformers' modules, and the backward pass of their many small operations, take
longer than the matrix products. Here norms and rotations have their own backward passes, the
attention of a row takes few calls, and after the last attention only cells are computed that
predict a loss token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import scaled_dot_product_attention

from relax_events.models.direct_model import Layer, Norm, is_plain
from relax_events.training.backend.tree_batches import TreeBatches
from relax_events.training.batch.prefix_tree import PrefixTree


class PlainDecoder:
    """The forward pass up to the output head of a model for which `is_plain` is true."""

    def __init__(self, language_model: Any) -> None:
        """Take the parts of the model."""
        self._embed, self._rotate = language_model.embed_tokens, language_model.rotary_emb
        self._layers = [Layer.of(layer) for layer in language_model.layers]
        self._norm = Norm.of(language_model.norm)
        width = int(self._layers[0].attention.head_dim)
        self._num_heads = len(self._layers[0].query.weight) // width
        half = torch.eye(width // 2)
        none = torch.zeros_like(half)
        self._turn = torch.cat([torch.cat([none, -half], 1), torch.cat([half, none], 1)])

    @staticmethod
    def is_plain(language_model: Any) -> bool:
        """Return whether a model's layers have the plain form, and keep their activations."""
        return is_plain(language_model, attention="sdpa") and all(
            "forward" not in vars(layer) for layer in language_model.layers
        )

    def __call__(
        self,
        tokens: Int[Tensor, "rows length"],
        positions: Int[Tensor, "rows length"],
        tree: PrefixTree | None,
        *,
        cells: Int[Tensor, " wanted"],
    ) -> Float[Tensor, "wanted hidden"]:
        """Return the hidden states after the last norm.

        Args:
            tokens: Padded behind.
            positions: Of each token in its sequence.
            tree: Of all rows, end to end; None where each row is a sequence.
            cells: Indices in all rows, end to end, of the states that are returned.
        """
        attend = self._attention(tokens.shape, tree)
        hidden = self._embed(tokens.flatten())
        cos, sin = (
            part[0].repeat(1, self._num_heads)
            for part in self._rotate(hidden, positions.view(1, -1))
        )
        for layer in self._layers:
            normed = _norm(hidden, layer.before_attention)
            attended = attend(
                self._heads(layer.query(normed), layer.query_norm, cos, sin),
                self._heads(layer.key(normed), layer.key_norm, cos, sin),
                layer.value(normed),
                scale=layer.attention.scaling,
            )
            if layer is self._layers[-1]:
                attended, hidden = attended.index_select(0, cells), hidden.index_select(0, cells)
            hidden = layer.output(attended).add_(hidden)
            normed = _norm(hidden, layer.before_mlp)
            gated = layer.activation(layer.gate(normed)) * layer.up(normed)
            hidden = layer.down(gated).add_(hidden)
        return _norm(hidden, self._norm)

    def _attention(self, shape: torch.Size, tree: PrefixTree | None) -> Callable[..., Tensor]:
        """Return the attention of all rows, from and to cells end to end."""
        num_groups = self._layers[0].num_key_heads
        if tree is not None:
            return TreeBatches(
                tree,
                num_cells=shape.numel(),
                num_heads=self._num_heads,
                num_groups=num_groups,
            )

        def attend(*parts: Tensor, scale: float) -> Tensor:
            query, key, value = (
                part.view(*shape, number, -1).transpose(1, 2)
                for part, number in zip(
                    parts, (self._num_heads, num_groups, num_groups), strict=True
                )
            )
            output: Tensor = scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=scale, enable_gqa=True
            )
            return output.transpose(1, 2).reshape(shape.numel(), -1)

        return attend

    def _heads(self, values: Tensor, norm: Norm | None, cos: Tensor, sin: Tensor) -> Tensor:
        if norm is not None:
            values = _norm(values.view(-1, len(norm.weight)), norm).view(values.shape)
        rotated: Tensor = _Rotation.apply(values, cos, sin, self._turn)
        return rotated


def _norm(values: Tensor, norm: Norm) -> Tensor:
    result: Tensor = _RmsNorm.apply(values, norm.weight, norm.eps)
    return result


class _RmsNorm(Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor, eps: float) -> Tensor:
        factors = values.pow(2).mean(-1, keepdim=True).add_(eps).rsqrt_()
        scaled = values * factors
        ctx.save_for_backward(scaled, factors, weight)
        return scaled * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        scaled, factors, weight = ctx.saved_tensors
        products = gradient * scaled
        means = (products @ (weight / len(weight)))[:, None]
        of_values = (gradient * weight).addcmul_(scaled, means, value=-1).mul_(factors)
        return of_values, products.sum(0), None


class _Rotation(Function):
    @staticmethod
    def forward(ctx: Any, heads: Tensor, cos: Tensor, sin: Tensor, turn: Tensor) -> Tensor:
        cos, sin = (part[:, : heads.shape[1]] for part in (cos, sin))
        ctx.save_for_backward(cos, sin, turn)
        turned = (heads.view(-1, len(turn)) @ turn.T).view(heads.shape)
        return (heads * cos).add_(turned.mul_(sin))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin, turn = ctx.saved_tensors
        turned = (gradient * sin).view(-1, len(turn)) @ turn
        return (gradient * cos).add_(turned.view(gradient.shape)), None, None, None
