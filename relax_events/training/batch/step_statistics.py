"""Computes the statistics of a whole step that an algorithm needs before its first backward pass,
over all ranks. Every function is collective.

The values are gathered, not averaged by part, so the result does not depend on how the step is
split.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from relax_events.algorithms.step_statistics import Whitening, second_moment_cutoff
from relax_events.training.ranks import Ranks


def compute_whitening(
    micro_batches: Iterable[tuple[NDArray[np.float32], NDArray[np.int64]]],
    *,
    over: Literal["none", "tokens", "samples"],
    correction: int = 0,
    ranks: Ranks,
) -> Whitening:
    """Return the mean and the deviation of a step's advantages.

    Args:
        micro_batches: Of this rank: the advantages of the loss tokens in packed order, and the
            number of loss tokens of each sample.
        over: Loss tokens, or samples that have any, each with the mean of its tokens.
        correction: Subtracted from their number in the deviation, 0 or 1.
        ranks: All of them.
    """
    if over == "none":
        return Whitening()
    values = np.concatenate(
        [np.zeros(0), *(_units(advantages, lengths, over) for advantages, lengths in micro_batches)]
    )
    count, total = ranks.all_gather(np.array([len(values), values.sum()])).sum(axis=0).tolist()
    if not count:
        return Whitening()
    mean = total / count
    squares = ranks.all_gather(np.square(values - mean).sum(keepdims=True)).sum()
    return Whitening(mean=mean, std=float(np.sqrt(squares / max(count - correction, 1))))


def compute_reward_scaling(
    rewards: Iterable[NDArray[np.float64]], *, correction: int = 1, ranks: Ranks
) -> Whitening:
    """Return the deviation of a step's rewards, to divide advantages by; their mean stays as it is.

    Where all rewards are equal, or there is only one, advantages do not change.

    Args:
        rewards: Of this rank's samples that have loss tokens, as scored.
        correction: Subtracted from their number in the deviation, 0 or 1.
        ranks: All of them.
    Source: TRL's GRPOTrainer, `scale_rewards = "batch"`, and Tricks or traps (arXiv 2508.08221):
    the prompt group's mean, the
        batch's deviation.
    """
    all_values = [
        np.frombuffer(data, np.float64)
        for data in ranks.all_gather_bytes(np.concatenate([np.zeros(0), *rewards]).tobytes())
    ]
    values = np.sort(np.concatenate(all_values))
    if len(values) < 2 or values[0] == values[-1]:
        return Whitening(eps=0.0)
    return Whitening(std=float(values.std(ddof=correction)))


def _units(
    advantages: NDArray[np.float32], lengths: NDArray[np.int64], over: str
) -> NDArray[np.float64]:
    values = advantages.astype(np.float64)
    if over == "tokens":
        return values
    lengths = lengths[lengths > 0]
    first = np.cumsum(lengths) - lengths
    return np.add.reduceat(values, first) / lengths if len(lengths) else np.zeros(0)


def compute_second_moment_cutoff(
    squares: Iterable[NDArray[np.float64]], *, threshold: float, ranks: Ranks
) -> float:
    """Return the bound of the squared log-ratios that a step trains; see `second_moment_cutoff`.

    Args:
        squares: Of this rank's loss tokens, in nats squared.
        threshold: Bound of their mean.
        ranks: All of them.
    """
    mine = np.concatenate([np.zeros(0), *squares])
    all_values = [
        np.frombuffer(data, np.float64) for data in ranks.all_gather_bytes(mine.tobytes())
    ]
    return second_moment_cutoff(np.concatenate(all_values), threshold=threshold)
