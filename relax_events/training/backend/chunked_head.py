"""A linear output head that is applied in chunks, whose weight gradients are added in at least
float32.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from relax_events.planning.memory import MAX_LOGITS_ELEMENTS


def count_chunk_tokens(vocab_size: int) -> int:
    """Return how many tokens a chunk of so many logits a token has."""
    return max(1, MAX_LOGITS_ELEMENTS // vocab_size)


class ChunkedHead:
    """A linear head applied to the chunks of one micro-batch. The weight's gradient is added in at
    least float32 and rounded once, after the backward pass of all chunks; in bfloat16, autograd
    would round each of hundreds of additions.
    """

    def __init__(self, head: nn.Module) -> None:
        """Wrap a linear head.

        Args:
            head: Computes `hidden @ weight.T + bias`.
        """
        weight = head.get_parameter("weight")
        self._weight, self._bias = weight.detach(), getattr(head, "bias", None)
        self._sum: Tensor = _WideSum.apply(weight)

    def __call__(
        self, hidden: Float[Tensor, "tokens hidden"]
    ) -> Float[Tensor, "tokens vocabulary"]:
        """Return the logits of a chunk."""
        logits: Tensor = _Linear.apply(hidden, self._weight, self._sum)
        return logits if self._bias is None else logits + self._bias


class _WideSum(torch.autograd.Function):
    """A placeholder for a weight in the graph, without values: its gradients are added in at least
    float32.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.dtype = weight.dtype
        return weight.new_zeros((), dtype=torch.promote_types(weight.dtype, torch.float32)).expand(
            weight.shape
        )

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.to(ctx.dtype)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, weight_sum: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.dtype = weight_sum.dtype
        return nn.functional.linear(hidden, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
        hidden, weight = ctx.saved_tensors
        of_hidden = gradient @ weight if ctx.needs_input_grad[0] else None
        of_weight = (gradient.T @ hidden).to(ctx.dtype) if ctx.needs_input_grad[2] else None
        return of_hidden, None, of_weight
