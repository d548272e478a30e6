"""Advantages of single tokens from rewards and a critic's values. Needs numpy alone, so that the advantage worker stays light."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64


@dataclass(frozen=True, slots=True)
class GroupValues:
    """The loss tokens of a prompt group, a row for each sample: those of all its turns one after another, and zeros behind the last.

    Attributes:
        rewards: The sample's reward at its last loss token, less the KL in the reward where a token has one.
        values: Of the critic: what it expects to come from here on, before it sees the token.
    """

    rewards: Float64[np.ndarray, "samples tokens"]
    values: Float64[np.ndarray, "samples tokens"]


def generalised_advantages(group: GroupValues, *, gamma: float, gae_lambda: float) -> Float64[np.ndarray, "samples tokens"]:
    """Sum the errors of the critic from each token on, each discounted by gamma * gae_lambda for a token that it lies ahead (GAE).

    The error at a token is reward + gamma * next value - value. Behind a sample's last loss token nothing comes, also where it was cut
    off by its length: no value is put in the place of what it might have become.

    Args:
        group: See `GroupValues`.
        gamma: Discount of rewards, 0 to 1.
        gae_lambda: Discount of the critic's errors besides, 0 to 1.
    Returns:
        Advantages, 0 behind a sample's last loss token.
    Source: Generalized advantage estimation (arXiv 1506.02438), equations 11 and 16.
    """
    following = np.zeros_like(group.values)
    following[:, :-1] = group.values[:, 1:]
    errors = group.rewards + gamma * following - group.values
    return discounted_sums(errors, factor=gamma * gae_lambda)


def discounted_sums(values: Float64[np.ndarray, "rows tokens"], *, factor: float) -> Float64[np.ndarray, "rows tokens"]:
    """Give at each place the sum over it and all that follow in its row, each times factor to the power of its distance.

    Every pass doubles how far the sums reach, so there are log2(tokens) of them, and no division that could overflow. What stands in other
    rows, or how many zeros are behind, changes no bit.

    Args:
        values: In rows.
        factor: 0 to 1.
    """
    sums, reach = values.copy(), 1
    while reach < values.shape[1]:
        sums[:, :-reach] += factor**reach * sums[:, reach:]
        reach *= 2
    return sums
