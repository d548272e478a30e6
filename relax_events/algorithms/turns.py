"""Finds the turns of a sample, and assigns rewards by turn and by token to loss tokens. Imports
numpy alone.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64, Int64
from numpy.typing import NDArray

from relax_events.errors import RewardError


def turn_lengths(loss_mask: NDArray[np.generic]) -> Int64[np.ndarray, " turns"]:
    """Count the loss tokens of each turn: consecutive tokens that the policy generated."""
    positions = np.flatnonzero(loss_mask)
    begins = np.flatnonzero(np.diff(positions, prepend=-2) > 1)
    return np.diff(begins, append=len(positions)).astype(np.int64)


def rewards_by_loss_token(
    loss_mask: NDArray[np.generic],
    *,
    turn_rewards: NDArray[np.generic] | None,
    token_rewards: NDArray[np.generic] | None,
    sample_id: str,
) -> Float64[np.ndarray, " loss_tokens"]:
    """Return a sample's rewards by turn and by token at its loss tokens: a turn's reward at its
    last token.

    The rest of the sample's reward belongs to its last loss token and is not included.

    Args:
        loss_mask: Of the sample.
        turn_rewards: One for each turn; None for none.
        token_rewards: One for each loss token; None for none.
        sample_id: For errors.
    Returns:
        The rewards of the loss tokens; zeros without rewards by turn or token.
    Raises:
        RewardError: The number of rewards differs from that of turns or loss tokens, or one
            is not finite.
    """
    lengths = turn_lengths(loss_mask)
    rewards = np.zeros(int(lengths.sum()))
    if turn_rewards is not None:
        rewards[np.cumsum(lengths) - 1] = _check_rewards(
            turn_rewards.astype(np.float64),
            len(lengths),
            f"sample {sample_id}: turn_rewards",
            "turn",
        )
    if token_rewards is not None:
        rewards += _check_rewards(
            token_rewards.astype(np.float64),
            len(rewards),
            f"sample {sample_id}: token_rewards",
            "loss token",
        )
    return rewards


def _check_rewards(
    rewards: NDArray[np.float64], number: int, what: str, unit: str
) -> NDArray[np.float64]:
    if rewards.shape != (number,):
        got = len(rewards) if rewards.ndim == 1 else f"shape {rewards.shape}"
        raise RewardError(
            f"{what} must be one for each {unit}, and there {'is' if number == 1 else 'are'} "
            f"{number}, got {got}"
        )
    if not np.isfinite(rewards).all():
        position = int(np.argmin(np.isfinite(rewards)))
        raise RewardError(f"{what} must be finite, got {rewards[position]} at {position}")
    return rewards
