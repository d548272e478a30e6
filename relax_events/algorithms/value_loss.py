"""Computes the value loss of a critic token by token. `aggregation` defines the mean
over a step, as for the policy (verl's `critic.loss_agg_mode`, by default the actor's).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ValueLosses:
    """A loss for each token, and where clipping increased it."""

    losses: Float[Tensor, " tokens"]
    clipped: Bool[Tensor, " tokens"]


def value_losses(
    values: Float[Tensor, " tokens"],
    *,
    old_values: Float[Tensor, " tokens"],
    returns: Float[Tensor, " tokens"],
    value_clip: float,
) -> ValueLosses:
    """Compute max((V - G)^2, (clip(V, Vo - value_clip, Vo + value_clip) - G)^2) / 2 for each token.

    Args:
        values: V, of the critic being trained; with gradient.
        old_values: Vo, the recorded values that the advantages were computed from.
        returns: G, the target of V.
        value_clip: Beyond this distance from the old value there is no gradient towards the return;
            0 for no clipping.
    Source: The N+ implementation details of RLHF with PPO (arXiv 2403.17031), value function loss
    clipping.
    """
    losses = (values - returns).square() / 2
    if not value_clip:
        return ValueLosses(losses, torch.zeros_like(losses, dtype=torch.bool))
    bounded = torch.maximum(torch.minimum(values, old_values + value_clip), old_values - value_clip)
    bounded_losses = (bounded - returns).square() / 2
    return ValueLosses(torch.maximum(losses, bounded_losses), (bounded_losses > losses).detach())
