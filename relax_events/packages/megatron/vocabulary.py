"""Log-probabilities of a vocabulary that is divided over the tensor-parallel ranks: each rank
computes the logits of its rows of the head, and only a few numbers a token travel.

    largest logit ── max over ranks    sum of exponentials, requested logits ── sum over ranks
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch import distributed as dist


class HeadRows(NamedTuple):
    """The rows of the output head on one rank.

    Attributes:
        first: Token id of the first row.
        num_valid: Rows that belong to a token; padding follows.
        group: The ranks that hold the others.
    """

    first: int
    num_valid: int
    group: Any


def sum_over_ranks(values: Tensor, group: Any) -> Tensor:
    """Return the sum over ranks that all compute the same loss from it; the gradient of a summand
    is the sum's.
    """
    return values if group.size() == 1 else _Sum.apply(values, group)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any) -> Tensor:
        del ctx
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        del ctx
        return gradient, None


def vocabulary_logprobs(
    head: Callable[[Tensor], Tensor],
    hidden: Float[Tensor, "tokens hidden"],
    ids: Int[Tensor, "tokens ids"],
    temperatures: Float[Tensor, " tokens"],
    rows: HeadRows,
    entropy_gradient: bool,
) -> tuple[Float[Tensor, "tokens ids"], Float[Tensor, " tokens"]]:
    """Return the tempered log-probabilities of token ids and the entropies, in nats, the same on
    all ranks of the head. Collective over them.

    Args:
        head: Computes the logits of this rank's rows.
        hidden: Hidden states, the same on all ranks; their gradients are to be summed over ranks.
        ids: Token ids of the whole vocabulary.
        temperatures: Divide the logits.
        rows: Which rows this rank has.
        entropy_gradient: Compute the entropies with gradient.
    """
    logits = head(hidden)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperatures[:, None]
    if rows.num_valid < logits.shape[1]:
        is_padding = torch.arange(logits.shape[1], device=logits.device) >= rows.num_valid
        logits = logits.masked_fill(is_padding, torch.finfo(logits.dtype).min / 2)
    largest = logits.detach().amax(-1)
    if rows.group.size() > 1:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=rows.group)
    exponentials = (logits - largest[:, None]).exp()
    columns = ids - rows.first
    is_own = (columns >= 0) & (columns < rows.num_valid)
    picked = logits.gather(-1, columns.clamp(0, logits.shape[1] - 1)) * is_own
    total, *requested = sum_over_ranks(
        torch.cat([exponentials.sum(-1, keepdim=True), picked], -1), rows.group
    ).unbind(-1)
    log_total = total.log() + largest
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        weighted = sum_over_ranks((exponentials * logits).sum(-1), rows.group)
        entropies = log_total - weighted / total
    return torch.stack(requested, -1) - log_total[:, None], entropies
