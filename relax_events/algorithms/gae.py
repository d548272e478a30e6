"""Computes token advantages from rewards and a critic's values (GAE), and assigns rewards of turns
and tokens to the tokens in the loss.

Imports numpy alone, so that the advantage worker needs no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float64, Int64
from numpy.typing import NDArray

from relax_events.algorithms.paths import find_turn_ends, turn_lengths
from relax_events.errors import RewardError
from relax_events.events.parts import MAX_REWARD, REWARD_RANGE


@dataclass(frozen=True, slots=True)
class GroupValues:
    """The loss tokens of a prompt group, a row for each path of its samples: the tokens of all its
    turns in order, padded with zeros. Most samples have one path.

    Attributes:
        rewards: A turn's reward at its last loss token, a token's reward at that token, and the
            rest of the sample's reward at the last loss token of each of its paths; minus the KL in
            the reward, token by token.
        values: The critic's prediction of the return from each token on. Zeros without a critic.
        lengths: Loss tokens of each row. A path that shares all of them with an earlier one has 0.
        is_truncated: Whether a path was truncated.
        turns: Loss tokens of each turn, for each row.
        owners: The sample of each row, by its position among those that count.
    """

    rewards: Float64[np.ndarray, "rows tokens"]
    values: Float64[np.ndarray, "rows tokens"]
    lengths: Int64[np.ndarray, " rows"] | None = None
    is_truncated: Bool[np.ndarray, " rows"] | None = None
    turns: Sequence[Int64[np.ndarray, " turns"]] | None = None
    owners: Int64[np.ndarray, " rows"] | None = None


def discounted_returns(group: GroupValues, *, gamma: float) -> Float64[np.ndarray, "rows tokens"]:
    """Return the sum of rewards from each loss token of a path on, discounted by gamma per token
    (REINFORCE++).

    Source: REINFORCE++ (arXiv 2501.03262), token-level returns with the KL in the reward; gamma as
    in OpenRLHF and verl.
    """
    return discounted_sums(group.rewards, factor=gamma)


def gae_advantages(
    group: GroupValues,
    *,
    gamma: float,
    gae_lambda: float,
    bootstrap_truncated: bool = False,
    length_adaptive_alpha: float = 0.0,
    turn_gamma: float = 0.0,
) -> Float64[np.ndarray, "rows tokens"]:
    """Return the sum of TD errors from each token of a path on, discounted by gamma * gae_lambda
    per token (GAE).

    The TD error at a token is reward + gamma * next value - value. After a path's last loss token
    the value is 0.

    Args:
        group: See `GroupValues`; the last three settings need its lengths, the last one its turns.
        gamma: Discount of rewards, 0 to 1.
        gae_lambda: Additional discount of the TD errors, 0 to 1.
        bootstrap_truncated: Use the value at the last loss token as the value after it, where a
            path was truncated. The value after it is not recorded.
        length_adaptive_alpha: Above 0, lambda is 1 - 1 / (alpha * loss tokens) of each path, at
            least 0, instead of gae_lambda.
        turn_gamma: Above 0, the advantage at the last token of each turn is computed by GAE over
            turns, from one turn's last token to the next one's, discounted by turn_gamma *
            gae_lambda. It then propagates to the earlier tokens of its turn as above.
    Returns:
        Advantages, 0 after a path's last loss token.
    Source: Generalized advantage estimation (arXiv 1506.02438), equations 11 and 16; lambda by
    length: VAPO (arXiv 2504.05118), section 4.2;
        by turn: bi-level GAE of VAGEN (arXiv 2510.16907).
    """
    following, bootstrap_values = np.zeros_like(group.values), np.zeros(len(group.values))
    following[:, :-1] = group.values[:, 1:]
    if bootstrap_truncated and group.is_truncated is not None:
        lengths = _lengths(group)
        rows = np.flatnonzero(group.is_truncated & (lengths > 0))
        bootstrap_values[rows] = group.values[rows, lengths[rows] - 1]
        following[rows, lengths[rows] - 1] = bootstrap_values[rows]
    errors = group.rewards + gamma * following - group.values
    if turn_gamma:
        return _sums_within_turns(
            group,
            errors,
            _turn_advantages(group, bootstrap_values, turn_gamma, gae_lambda),
            factor=gamma * gae_lambda,
        )
    if not length_adaptive_alpha:
        return discounted_sums(errors, factor=gamma * gae_lambda)
    lambdas = np.maximum(0.0, 1 - 1 / (length_adaptive_alpha * np.maximum(_lengths(group), 1)))
    return discounted_sums(errors, factor=gamma * lambdas[:, None])


def _turn_advantages(
    group: GroupValues,
    bootstrap_values: Float64[np.ndarray, " rows"],
    turn_gamma: float,
    gae_lambda: float,
) -> list[Float64[np.ndarray, " turns"]]:
    """Return the advantage of each turn: GAE over the last tokens of the turns, with the value
    after the last one.
    """
    advantages = []
    for row, lengths in enumerate(_turns(group)):
        ends = np.cumsum(lengths) - 1
        values = group.values[row, ends]
        errors = (
            group.rewards[row, ends]
            + turn_gamma * np.append(values[1:], bootstrap_values[row])[: len(ends)]
            - values
        )
        advantages.append(discounted_sums(errors[None], factor=turn_gamma * gae_lambda)[0])
    return advantages


def _sums_within_turns(
    group: GroupValues,
    errors: Float64[np.ndarray, "rows tokens"],
    turn_advantages: list[Float64[np.ndarray, " turns"]],
    *,
    factor: float,
) -> Float64[np.ndarray, "rows tokens"]:
    """Sum errors from each token to the end of its turn, where the turn's advantage respans
    the error.
    """
    turns, advantages = _turns(group), np.zeros_like(errors)
    spans = [
        (row, end - length, end)
        for row, lengths in enumerate(turns)
        for length, end in zip(lengths, np.cumsum(lengths), strict=True)
    ]
    rows = np.zeros((len(spans), max((end - begin for _, begin, end in spans), default=0)))
    for number, ((row, begin, end), turn_advantage) in enumerate(
        zip(spans, np.concatenate([np.zeros(0), *turn_advantages]), strict=True)
    ):
        rows[number, : end - begin] = errors[row, begin:end]
        rows[number, end - begin - 1] = turn_advantage
    for (row, begin, end), sums in zip(spans, discounted_sums(rows, factor=factor), strict=True):
        advantages[row, begin:end] = sums[: end - begin]
    return advantages


def _turns(group: GroupValues) -> Sequence[Int64[np.ndarray, " turns"]]:
    if group.turns is None:
        raise RewardError("turn_gamma needs the number of loss tokens of each turn, got none")
    return group.turns


def _lengths(group: GroupValues) -> Int64[np.ndarray, " rows"]:
    if group.lengths is None:
        raise RewardError(
            "bootstrap_truncated and length_adaptive_alpha need the number of loss tokens of "
            "each path, got none"
        )
    return group.lengths


def discounted_sums(
    values: Float64[np.ndarray, "rows tokens"], *, factor: float | Float64[np.ndarray, "rows 1"]
) -> Float64[np.ndarray, "rows tokens"]:
    """Return at each position the sum of it and all later values in its row, each times factor to
    the power of its distance.

    Every pass doubles the reach of the sums, so there are log2(tokens) passes, and no division that
    could overflow. Other rows and the number of padding zeros change no bit.

    Args:
        values: In rows.
        factor: 0 to 1; for all rows, or for each row.
    """
    sums, reach = values.copy(), 1
    while reach < values.shape[1]:
        sums[:, :-reach] += factor**reach * sums[:, reach:]
        reach *= 2
    return sums


def rewards_by_loss_token(
    loss_mask: NDArray[np.generic],
    *,
    turn_rewards: NDArray[np.generic] | None,
    token_rewards: NDArray[np.generic] | None,
    sample_id: str,
    tokens: NDArray[np.generic] | None = None,
    path_lengths: Sequence[int] = (),
) -> Float64[np.ndarray, " loss_tokens"]:
    """Return a sample's rewards by turn and by token at its loss tokens: a turn's reward at its
    last token.

    The rest of the sample's reward belongs to the last loss token of each path and is not included.

    Args:
        loss_mask: Of the sample.
        turn_rewards: One for each turn of the last path; None for none.
        token_rewards: One for each loss token of all paths; None for none.
        sample_id: For errors.
        tokens: Of the sample; needed for `turn_rewards` of several paths.
        path_lengths: Tokens of each path; empty for a single one.
    Returns:
        The rewards of the loss tokens; zeros without rewards by turn or token.
    Raises:
        RewardError: The number of rewards differs from that of turns or loss tokens, one is not
            finite, or the tokens are missing.
    """
    rewards = np.zeros(np.count_nonzero(loss_mask))
    if turn_rewards is not None:
        if not path_lengths:
            ends = np.cumsum(turn_lengths(loss_mask)) - 1
        elif tokens is not None:
            ends = find_turn_ends(tokens, loss_mask, path_lengths)
        else:
            raise RewardError(
                f"sample {sample_id} has rewards by turn and {len(path_lengths)} paths, and its "
                "tokens, by which the turns are found, were not fetched; give the reward function "
                "a parameter `turns`, so that they are fetched"
            )
        rewards[ends] = _check_rewards(
            turn_rewards.astype(np.float64),
            len(ends),
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
    if not (is_bounded := np.abs(rewards) <= MAX_REWARD).all():
        position = int(np.argmin(is_bounded))
        raise RewardError(f"{what} must be {REWARD_RANGE}, got {rewards[position]} at {position}")
    return rewards
