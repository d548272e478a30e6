"""Computes the statistics of a whole step that an algorithm needs before its first backward pass:
whitening, reward scaling and the second-moment cutoff.

The `compute_*` functions are collective: every rank calls them. They gather all values instead of
averaging partial results, so the statistics do not depend on how the step is split. The other
functions take values in any order. Imports numpy alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float64
from numpy.typing import NDArray

from relax_events.training.ranks import GatheringRanks

EPS = 1e-8


@dataclass(frozen=True, slots=True)
class Whitening:
    """Mean and deviation over a step."""

    mean: float = 0.0
    std: float = 1.0
    eps: float = EPS

    def apply(self, values: Float64[np.ndarray, " values"]) -> Float64[np.ndarray, " values"]:
        """Return the values with mean 0 and deviation 1 over the step; all zeros where they are
        equal.

        Source: REINFORCE++ (arXiv 2501.03262), global advantage normalisation; deviation with n.
        """
        return (values - self.mean) / (self.std + self.eps)


def second_moment_cutoff(squares: Float64[np.ndarray, " tokens"], *, threshold: float) -> float:
    """Return the bound of the squared log-ratios that are trained: the mean over all below it is at
    most the threshold (M2PO).

    It lies between the largest kept and the smallest dropped value, so that rounding in a second
    forward pass does not matter. Equal values are kept or dropped together, so that the order of
    the tokens does not matter.

    Args:
        squares: (logprobs - rollout_logprobs)^2 of every loss token of the step, in nats squared.
        threshold: Bound of their mean.
    Returns:
        The bound, infinite where nothing is dropped, -1 where everything is.
    Source: M2PO (arXiv 2510.01161): the tokens with the largest second moment are dropped first,
    until the mean of the others is small enough.
    """
    ordered = np.sort(squares)
    if not len(ordered):
        return np.inf
    means = np.cumsum(ordered) / np.arange(1, len(ordered) + 1)
    ends_run = np.append(ordered[1:] != ordered[:-1], True)
    kept = ends_run & (means <= threshold)
    if kept[-1]:
        return np.inf
    if not kept.any():
        return -1.0
    last = np.flatnonzero(kept)[-1]
    return float((ordered[last] + ordered[last + 1]) / 2)


def compute_whitening(
    micro_batches: Iterable[tuple[NDArray[np.float32], NDArray[np.int64]]],
    *,
    over: Literal["none", "mean", "tokens", "samples"],
    correction: int = 0,
    ranks: GatheringRanks,
) -> Whitening:
    """Return the mean and the deviation of a step's advantages.

    Args:
        micro_batches: Of this rank: the advantages of the loss tokens in packed order, and the
            number of loss tokens of each sample.
        over: Loss tokens, or samples that have any, each with the mean of its tokens; `mean` is
            that of the samples, without a deviation.
        correction: Subtracted from their number in the deviation, 0 or 1.
        ranks: All of them.
    """
    if over == "none":
        return Whitening()
    values = _gather_sorted(
        (_units(advantages, lengths, over) for advantages, lengths in micro_batches), ranks=ranks
    )
    if not len(values):
        return Whitening()
    # the mean of equal values may differ from them by rounding
    mean = float(values[0] if values[0] == values[-1] else values.mean())
    if over == "mean":
        return Whitening(mean=mean, eps=0.0)
    squares = float(np.square(values - mean).sum())
    return Whitening(mean=mean, std=float(np.sqrt(squares / max(len(values) - correction, 1))))


def compute_reward_scaling(
    rewards: Iterable[NDArray[np.float64]], *, correction: int = 1, ranks: GatheringRanks
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
    values = _gather_sorted(rewards, ranks=ranks)
    if len(values) < 2 or values[0] == values[-1]:
        return Whitening(eps=0.0)
    return Whitening(std=float(values.std(ddof=correction)))


def _gather_sorted(
    parts: Iterable[NDArray[np.float64]], *, ranks: GatheringRanks
) -> Float64[np.ndarray, " values"]:
    """Gather the parts of all ranks, in ascending order: the same array however they are split."""
    rows = ranks.all_gather_bytes(np.concatenate([np.zeros(0), *parts]).tobytes())
    return np.sort(np.concatenate([np.frombuffer(row, np.float64) for row in rows]))


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
    squares: Iterable[NDArray[np.float64]], *, threshold: float, ranks: GatheringRanks
) -> float:
    """Return the bound of the squared log-ratios that a step trains; see `second_moment_cutoff`.

    Args:
        squares: Of this rank's loss tokens, in nats squared.
        threshold: Bound of their mean.
        ranks: All of them.
    """
    return second_moment_cutoff(_gather_sorted(squares, ranks=ranks), threshold=threshold)
