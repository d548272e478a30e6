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
    """What the output head takes.

    Attributes:
        hidden: A row for each loss token, or for each of those `rows` that are computed once.
        targets: Of each loss token.
        temperatures: Of each row of `hidden`.
        ids: The requested ones of each loss token.
        rows: Row of each loss token; None where each has its own.
    """

    hidden: Float[Tensor, "rows hidden"]
    targets: Int[Tensor, " loss_tokens"]
    temperatures: Float[Tensor, " rows"]
    ids: Int[Tensor, "loss_tokens ids"]
    rows: Int[Tensor, " loss_tokens"] | None = None

    def expanded(self) -> HeadInputs:
        """Return the same with a row for each loss token."""
        if self.rows is None:
            return self
        hidden, temperatures = (
            values.index_select(0, self.rows) for values in (self.hidden, self.temperatures)
        )
        return HeadInputs(hidden, self.targets, temperatures, self.ids)


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
    *values_of_tokens, _ = inputs.expanded()
    parts = [
        checkpoint(
            _head_logprobs,
            chunked,
            *piece,
            None,
            entropy_gradient,
            num_top,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        for piece in zip(*(values.split(chunk) for values in values_of_tokens), strict=True)
    ]
    return tuple(torch.cat(values) for values in zip(*parts, strict=True))


def _apply_whole_head(
    head: nn.Module, inputs: HeadInputs, entropy_gradient: bool, num_top: int
) -> tuple[Tensor, ...]:
    """Apply the head to all rows at once, padded to a multiple of `HEAD_ROWS`."""
    missing = -len(inputs.hidden) % HEAD_ROWS
    hidden = torch.nn.functional.pad(inputs.hidden, (0, 0, 0, missing))
    temperatures = torch.nn.functional.pad(inputs.temperatures, (0, missing), value=1)
    num_tokens, rows = len(inputs.targets), inputs.rows
    targets, ids = inputs.targets, inputs.ids
    if rows is None:
        targets = torch.nn.functional.pad(targets, (0, missing))
        ids = torch.nn.functional.pad(ids, (0, 0, 0, missing))
    whole = _head_logprobs(
        head, hidden, targets, temperatures, ids, rows, entropy_gradient, num_top
    )
    return tuple(values[:num_tokens] for values in whole)


def _head_logprobs(
    head: Callable[[Tensor], Tensor],
    hidden: Float[Tensor, "rows hidden"],
    targets: Int[Tensor, " tokens"],
    temperatures: Float[Tensor, " rows"],
    ids: Int[Tensor, "tokens ids"],
    rows: Int[Tensor, " tokens"] | None,
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
        row_logprobs = (
            logprobs.detach() if rows is None else logprobs.detach().index_select(0, rows)
        )
        ids = _with_most_probable(ids, row_logprobs, num_top)
    # Once for both: a second `gather` without a gradient would keep each chunk's log-probabilities
    # until the end of the backward pass.
    columns = torch.cat([targets[:, None], ids], dim=-1)
    if rows is None:
        chosen = logprobs.gather(-1, columns)
    else:
        entropies = entropies.index_select(0, rows)
        columns = columns + rows[:, None] * logprobs.shape[1]
        chosen = logprobs.flatten().index_select(0, columns.flatten()).view(columns.shape)
    return chosen[:, 0], entropies, ids, chosen[:, 1:]


def _with_most_probable(
    ids: Int[Tensor, "tokens given"], logprobs: Float[Tensor, "tokens vocabulary"], num_top: int
) -> Int[Tensor, "tokens all"]:
    """Return the ids, and after them so many of the most probable others, most probable first."""
    if not ids.shape[1]:
        return logprobs.topk(num_top, dim=-1).indices
    others = logprobs.scatter(-1, ids, -torch.inf)
    return torch.cat([ids, others.topk(num_top, dim=-1).indices], dim=-1)
