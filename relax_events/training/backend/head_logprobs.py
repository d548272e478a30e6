"""Applies the output head to the hidden states of loss tokens: log-probabilities and entropies,
never whole logits of a large micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from relax_events.training.backend.chunked_head import ChunkedHead

# below eight rows the CPU's matrix product sums in another order, so a token's rounding would
# depend more on the other tokens
HEAD_ROWS = 8


class HeadInputs(NamedTuple):
    """What the output head takes at each loss token; `ids` are the requested ones."""

    hidden: Float[Tensor, "loss_tokens hidden"]
    targets: Int[Tensor, " loss_tokens"]
    temperatures: Float[Tensor, " loss_tokens"]
    ids: Int[Tensor, "loss_tokens ids"]


def apply_head(
    head: nn.Module, inputs: HeadInputs, *, chunk: int, entropy_gradient: bool, num_top: int
) -> tuple[Tensor, ...]:
    """Return log-probabilities, entropies, ids and the ids' log-probabilities at each loss token.

    Args:
        head: Linear, from hidden states to logits.
        inputs: Of all loss tokens.
        chunk: So many tokens at a time; the backward pass computes each chunk again where there are
            several.
        entropy_gradient: Compute entropies with gradient.
        num_top: Return so many of the most probable ids too: of the ids that were not requested,
            and after them.
    """
    if len(inputs.targets) <= chunk:
        return _apply_whole_head(head, inputs, entropy_gradient, num_top)
    chunked = ChunkedHead(head)
    parts = [
        checkpoint(
            _head_logprobs,
            chunked,
            *piece,
            entropy_gradient,
            num_top,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        for piece in zip(*(values.split(chunk) for values in inputs), strict=True)
    ]
    return tuple(torch.cat(values) for values in zip(*parts, strict=True))


def _apply_whole_head(
    head: nn.Module, inputs: HeadInputs, entropy_gradient: bool, num_top: int
) -> tuple[Tensor, ...]:
    """Apply the head to all loss tokens at once, padded to a multiple of `HEAD_ROWS`."""
    num_tokens, missing = len(inputs.targets), -len(inputs.targets) % HEAD_ROWS
    targets, temperatures = (
        torch.nn.functional.pad(values, (0, missing), value=1)
        for values in (inputs.targets, inputs.temperatures)
    )
    hidden, ids = (
        torch.nn.functional.pad(values, (0, 0, 0, missing))
        for values in (inputs.hidden, inputs.ids)
    )
    whole = _head_logprobs(head, hidden, targets, temperatures, ids, entropy_gradient, num_top)
    return tuple(values[:num_tokens] for values in whole)


def _head_logprobs(
    head: Callable[[Tensor], Tensor],
    hidden: Float[Tensor, "tokens hidden"],
    targets: Int[Tensor, " tokens"],
    temperatures: Float[Tensor, " tokens"],
    ids: Int[Tensor, "tokens ids"],
    entropy_gradient: bool,
    num_top: int,
) -> tuple[
    Float[Tensor, " tokens"],
    Float[Tensor, " tokens"],
    Int[Tensor, "tokens ids"],
    Float[Tensor, "tokens ids"],
]:
    logits = head(hidden)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperatures[:, None]
    logprobs = logits.log_softmax(-1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropies = -(logprobs.exp() * logprobs).sum(-1)
    if num_top:
        ids = _with_most_probable(ids, logprobs.detach(), num_top)
    # Once for both: a second `gather` without a gradient would keep each chunk's log-probabilities
    # until the end of the backward pass.
    chosen = logprobs.gather(-1, torch.cat([targets[:, None], ids], dim=-1))
    return chosen[:, 0], entropies, ids, chosen[:, 1:]


def _with_most_probable(
    ids: Int[Tensor, "tokens given"], logprobs: Float[Tensor, "tokens vocabulary"], num_top: int
) -> Int[Tensor, "tokens all"]:
    """Return the ids, and after them so many of the most probable others, most probable first."""
    if not ids.shape[1]:
        return logprobs.topk(num_top, dim=-1).indices
    others = logprobs.scatter(-1, ids, -torch.inf)
    return torch.cat([ids, others.topk(num_top, dim=-1).indices], dim=-1)
