"""Compares two scorings of the same completions: how often they agree, how they correlate, and
where they differ most. Memory: some 40 bytes a completion, and the examples.
"""

from __future__ import annotations

import heapq
import math
import random
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from relax_events.rewards.pool import RewardItem
from relax_events.rewards.scores import Score
from relax_events.rewards.trial import Completion, Result, ScoredCompletion

END_CHARACTERS = 400
TOLERANCE = 1e-9
Floats = NDArray[np.float64]
Pair = tuple[float | None, float | None]


class Scorer(Protocol):
    """Gives rewards to completions: a function scores them, or a log has their scores."""

    name: str

    def score(self, batch: Sequence[Completion], /) -> Sequence[Result]:
        """Return a score or an error for each completion."""

    def describe(self, item: RewardItem, result: Result, /) -> ScoredCompletion:
        """Return a result with its explanation, if there is one."""


@dataclass(frozen=True, slots=True)
class Example:
    """A completion whose rewards differ, or that only one scorer could score; only its last
    characters.
    """

    sample_id: str
    completion_end: str
    answer: str
    first: ScoredCompletion
    second: ScoredCompletion


@dataclass(slots=True)
class Comparison:
    """The result. Metrics that are undefined for an empty or constant set of samples are None.

    With a threshold two rewards differ when they are on different sides of it, else when they are
    not equal. `num_compared` of the `num_samples` have both rewards; agreements, means, difference
    and correlations are of these samples. A failure of both counts for each. A prompt group counts
    when all its samples have both rewards; it is informative when they are not all equal: only then
    it has a training signal.
    """

    first: str
    second: str
    threshold: float | None
    num_samples: int = 0
    num_compared: int = 0
    num_agree: int = 0
    num_differ: int = 0
    num_first_higher: int = 0
    num_second_higher: int = 0
    num_first_failed: int = 0
    num_second_failed: int = 0
    num_both_failed: int = 0
    first_mean: float | None = None
    second_mean: float | None = None
    mean_absolute_difference: float | None = None
    pearson: float | None = None
    spearman: float | None = None
    num_prompt_groups: int = 0
    num_reranked: int = 0
    num_became_informative: int = 0
    num_became_uninformative: int = 0
    examples: list[Example] = field(default_factory=list)


def compare_scores(
    batches: Iterable[Sequence[Completion]],
    first: Scorer,
    second: Scorer,
    *,
    threshold: float | None,
    num_examples: int,
    report: Callable[[Comparison], None] = lambda _: None,
) -> Comparison:
    """Score completions twice, and compare the scores.

    Args:
        batches: The completions.
        first: One scorer.
        second: The other.
        threshold: Rewards at or above it count as good, and only good and bad differ; None compares
            the rewards themselves.
        num_examples: Maximum number of examples: the samples that differ most come first, equal
            differences are chosen evenly, and the samples that only one scorer could score come
            last.
        report: Called with the counts after each batch.
    """
    comparison = ScoreComparison(
        Comparison(first.name, second.name, threshold), num_examples=num_examples
    )
    for batch in batches:
        for case in zip(batch, first.score(batch), second.score(batch), strict=True):
            comparison.add(*case)
        report(comparison.result)
    return comparison.finish(first, second)


class ScoreComparison:
    """Accumulates completions with both results."""

    def __init__(self, result: Comparison, *, num_examples: int) -> None:
        self.result = result
        self._num_examples = num_examples
        self._rewards = array("d"), array("d")
        self._open_groups: dict[str, list[Pair]] = {}
        self._cases: list[tuple[float, float, RewardItem, Result, Result]] = []
        self._chance = random.Random(0)  # noqa: S311  examples, no secret

    def add(self, completion: Completion, first: Result, second: Result) -> None:
        """Add a completion."""
        one = first.reward if isinstance(first, Score) else None
        two = second.reward if isinstance(second, Score) else None
        self._count(one, two)
        if (difference := self._measure(one, two)) is not None:
            case = (difference, self._chance.random(), completion.item, first, second)
            add_case = (
                heapq.heappush if len(self._cases) < self._num_examples else heapq.heappushpop
            )
            add_case(self._cases, case)
        if completion.group_size:
            key = completion.item.prompt_group_id
            pairs = self._open_groups.setdefault(key, [])
            pairs.append((one, two))
            if len(pairs) == completion.group_size:
                self._add_group(self._open_groups.pop(key))

    def _count(self, first: float | None, second: float | None) -> None:
        result = self.result
        result.num_samples += 1
        result.num_first_failed += first is None
        result.num_second_failed += second is None
        result.num_both_failed += first is None and second is None
        if first is None or second is None:
            return
        result.num_compared += 1
        self._rewards[0].append(first)
        self._rewards[1].append(second)
        do_differ = _differ(first, second, result.threshold)
        result.num_differ += do_differ
        result.num_agree += not do_differ
        result.num_first_higher += do_differ and first > second
        result.num_second_higher += do_differ and second > first

    def _measure(self, first: float | None, second: float | None) -> float | None:
        """Return how well a completion serves as an example; None if it is none."""
        if first is None or second is None:
            return None if first is second else -1.0
        return abs(first - second) if _differ(first, second, self.result.threshold) else None

    def _add_group(self, pairs: Sequence[Pair]) -> None:
        if any(None in pair for pair in pairs):
            return
        first, second = np.array(pairs, np.float64).T
        was, is_now = np.ptp(first) > 0, np.ptp(second) > 0
        result = self.result
        result.num_prompt_groups += 1
        result.num_reranked += not np.array_equal(ranks(first), ranks(second))
        result.num_became_informative += bool(is_now and not was)
        result.num_became_uninformative += bool(was and not is_now)

    def finish(self, first: Scorer, second: Scorer) -> Comparison:
        """Return the result over all added completions, with the explanations of both scorers."""
        for pairs in self._open_groups.values():
            self._add_group(pairs)
        self._open_groups.clear()
        result = self.result
        one, two = (np.array(rewards) for rewards in self._rewards)
        if result.num_compared:
            result.first_mean, result.second_mean = float(one.mean()), float(two.mean())
            result.mean_absolute_difference = float(np.abs(one - two).mean())
        result.pearson = correlation(one, two)
        result.spearman = correlation(ranks(one), ranks(two))
        cases = sorted(self._cases, key=lambda case: case[:2], reverse=True)
        result.examples = [
            Example(
                item.sample_id,
                item.completion[-END_CHARACTERS:],
                item.answer,
                first.describe(item, first_result),
                second.describe(item, second_result),
            )
            for _, _, item, first_result, second_result in cases
        ]
        return result


def _differ(first: float, second: float, threshold: float | None) -> bool:
    if threshold is not None:
        return (first >= threshold) != (second >= threshold)
    return not math.isclose(first, second, rel_tol=TOLERANCE, abs_tol=TOLERANCE)


def ranks(values: Floats) -> Floats:
    """Return the rank of each value, from 1; equal values share the mean of their ranks."""
    _, positions, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    shared: Floats = (last - (counts - 1) / 2)[positions]
    return shared


def correlation(first: Floats, second: Floats) -> float | None:
    """Return Pearson's correlation; None for fewer than two values, or when one side is
    constant.
    """
    if len(first) < 2 or not np.ptp(first) or not np.ptp(second):
        return None
    return float(np.clip(np.corrcoef(first, second)[0, 1], -1.0, 1.0))
