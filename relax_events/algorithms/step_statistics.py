"""Computes statistics of a whole step from its values in any order. Imports numpy alone; the caller
gathers the values.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

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
