"""Compares two reward functions on the same samples. Pure arithmetic; memory grows by some 40 bytes
a sample.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
NUM_EXTREMES = 10


@dataclass(frozen=True, slots=True)
class ScoredPair:
    """A sample with its original and its new reward; None where scoring failed or is missing."""

    sample_id: str
    policy_version: int
    original: float | None
    new: float | None
    completion: str = ""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result. Metrics that are undefined for an empty or constant set of samples are None.

    `num_compared` of the `num_samples` have both rewards; the means, the difference, the
    correlations and the agreement are of those. A prompt group counts when all its samples have
    both. It is informative when its rewards are not all equal: only then it has a training signal.
    """

    num_samples: int
    num_compared: int
    original_failed_ratio: float | None
    new_failed_ratio: float | None
    original_mean: float | None
    new_mean: float | None
    mean_absolute_difference: float | None
    pearson: float | None
    spearman: float | None
    threshold: float
    agreement_ratio: float | None
    num_prompt_groups: int
    num_reranked: int
    num_became_informative: int
    num_became_uninformative: int
    extremes: list[ScoredPair] = field(default_factory=list)


class ScoreComparison:
    """Accumulates samples prompt group by prompt group, and returns the result at the end."""

    def __init__(self, *, threshold: float) -> None:
        """Start empty.

        Args:
            threshold: Rewards from here on count as good, for the agreement.
        """
        self._threshold = threshold
        self._original, self._new = array("d"), array("d")
        self._num_samples = self._num_original_failed = self._num_new_failed = 0
        self._groups = self._reranked = self._informed = self._uninformed = 0
        self._extremes: list[tuple[float, str, int, ScoredPair]] = []

    def add_group(self, pairs: Sequence[ScoredPair]) -> None:
        """Add all samples of one generation of a prompt group."""
        self._num_samples += len(pairs)
        self._num_original_failed += sum(pair.original is None for pair in pairs)
        self._num_new_failed += sum(pair.new is None for pair in pairs)
        original, new = array("d"), array("d")
        for pair in pairs:
            if pair.original is not None and pair.new is not None:
                original.append(pair.original)
                new.append(pair.new)
                self._add_extreme(abs(pair.original - pair.new), pair)
        self._original += original
        self._new += new
        if pairs and len(original) == len(pairs):
            self._add_rankings(np.array(original), np.array(new))

    def _add_extreme(self, difference: float, pair: ScoredPair) -> None:
        entry = (difference, pair.sample_id, pair.policy_version, pair)
        if difference > 0 and len(self._extremes) < NUM_EXTREMES:
            heapq.heappush(self._extremes, entry)
        elif difference > 0 and entry[:3] > self._extremes[0][:3]:
            heapq.heapreplace(self._extremes, entry)

    def _add_rankings(self, original: Floats, new: Floats) -> None:
        self._groups += 1
        self._reranked += not np.array_equal(ranks(original), ranks(new))
        was, is_now = np.ptp(original) > 0, np.ptp(new) > 0
        self._informed += bool(is_now and not was)
        self._uninformed += bool(was and not is_now)

    def result(self) -> Comparison:
        """Return the metrics over all added samples."""
        original, new = np.array(self._original), np.array(self._new)
        is_empty = not len(original)
        agree = (original >= self._threshold) == (new >= self._threshold)
        return Comparison(
            num_samples=self._num_samples,
            num_compared=len(original),
            original_failed_ratio=self._num_original_failed / self._num_samples
            if self._num_samples
            else None,
            new_failed_ratio=self._num_new_failed / self._num_samples
            if self._num_samples
            else None,
            original_mean=None if is_empty else float(original.mean()),
            new_mean=None if is_empty else float(new.mean()),
            mean_absolute_difference=None if is_empty else float(np.abs(original - new).mean()),
            pearson=correlation(original, new),
            spearman=correlation(ranks(original), ranks(new)),
            threshold=self._threshold,
            agreement_ratio=None if is_empty else float(agree.mean()),
            num_prompt_groups=self._groups,
            num_reranked=self._reranked,
            num_became_informative=self._informed,
            num_became_uninformative=self._uninformed,
            extremes=[
                entry[-1]
                for entry in sorted(self._extremes, key=lambda entry: (-entry[0], entry[1]))
            ],
        )


def ranks(values: Floats) -> Floats:
    """Return the rank of each value, from 1; equal values share the mean of their ranks."""
    _, topic_partitions, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    shared: Floats = (last - (counts - 1) / 2)[topic_partitions]
    return shared


def correlation(first: Floats, second: Floats) -> float | None:
    """Return Pearson's correlation; None for fewer than two values, or when one side is
    constant.
    """
    if len(first) < 2 or not np.ptp(first) or not np.ptp(second):
        return None
    return float(np.clip(np.corrcoef(first, second)[0, 1], -1.0, 1.0))
