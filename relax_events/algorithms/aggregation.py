"""Aggregates token losses to the mean over a step, independent of how the step is split.

A step's loss is

    sum over micro-batches of (token_weights * losses).sum()  /  sum over micro-batches of num_units

so the sum over micro-batches, packed rows and ranks is the same for any split.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

Aggregation = Literal["token_mean", "sample_mean", "constant_length"]


def token_weights(
    num_loss_tokens: Int[Tensor, " samples"],
    *,
    aggregation: Aggregation,
    length_normaliser: int = 1,
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, " tokens"]:
    """Return the raw weight of each loss token: 1 for `token_mean`, 1 / (loss tokens of its sample)
    for `sample_mean`, 1 / length_normaliser.

    Divide the weighted sum over a whole step by the sum of `num_units` over the step, never by a
    micro-batch's own.

    Args:
        num_loss_tokens: Of each sample in packed order; a sample may have none.
        aggregation: How the step's mean is defined.
        length_normaliser: Of `constant_length`, in tokens.
        dtype: Of the weights.
    Returns:
        Unnormalised weights, in packed order.
    """
    if aggregation == "sample_mean":
        return (1 / num_loss_tokens.clamp(min=1).to(dtype)).repeat_interleave(num_loss_tokens)
    weight = 1.0 if aggregation == "token_mean" else 1 / length_normaliser
    return torch.full(
        (int(num_loss_tokens.sum()),), weight, dtype=dtype, device=num_loss_tokens.device
    )


def num_units(num_loss_tokens: Int[Tensor, " samples"], *, aggregation: Aggregation) -> int:
    """Return the normaliser of the step's mean: loss tokens for `token_mean`, samples that have any
    for the others.

    Args:
        num_loss_tokens: Of each sample.
        aggregation: How the step's mean is defined.
    Returns:
        This part's share of the step's normaliser.
    """
    return int(
        num_loss_tokens.sum() if aggregation == "token_mean" else (num_loss_tokens > 0).sum()
    )
