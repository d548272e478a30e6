"""Count where two reward functions differ on the same completions. Memory: one batch and the
examples.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Generic, TypeVar

from relax_events.config import RewardConfig
from relax_events.errors import RewardError
from relax_events.rewards.pool import RewardItem
from relax_events.rewards.scores import Score
from relax_events.rewards.trial import RewardTrial, ScoredCompletion

BATCH_ITEMS = 256
END_CHARACTERS = 400
TOLERANCE = 1e-9
Result = Score | RewardError
T = TypeVar("T")


@dataclass(slots=True)
class DifferenceCounts:
    """Counts of completions. Those scored by both functions agree or differ; a failure of both
    counts for each.
    """

    num_samples: int = 0
    num_agree: int = 0
    num_differ: int = 0
    num_first_higher: int = 0
    num_second_higher: int = 0
    num_first_failed: int = 0
    num_second_failed: int = 0
    num_both_failed: int = 0

    def add(self, first: Result, second: Result, threshold: float | None) -> bool:
        """Count a completion; return whether both functions scored it and differ."""
        self.num_samples += 1
        is_first_scored, is_second_scored = isinstance(first, Score), isinstance(second, Score)
        self.num_first_failed += not is_first_scored
        self.num_second_failed += not is_second_scored
        self.num_both_failed += not is_first_scored and not is_second_scored
        if not isinstance(first, Score) or not isinstance(second, Score):
            return False
        do_differ = _differ(first.reward, second.reward, threshold)
        self.num_agree += not do_differ
        self.num_differ += do_differ
        self.num_first_higher += do_differ and first.reward > second.reward
        self.num_second_higher += do_differ and second.reward > first.reward
        return do_differ


@dataclass(frozen=True, slots=True)
class Example:
    """A completion for which the functions differ, or that only one of them could score; only its
    last characters.
    """

    sample_id: str
    completion_end: str
    answer: str
    first: ScoredCompletion
    second: ScoredCompletion


@dataclass(frozen=True, slots=True)
class Differences:
    """The result of a comparison. With a threshold two rewards differ when they are on different
    sides of it, else when they are not equal.
    """

    first: str
    second: str
    threshold: float | None
    counts: DifferenceCounts
    examples: list[Example] = field(default_factory=list)


class ReservoirSampler(Generic[T]):
    """Samples uniformly from a stream of items, with a fixed seed (reservoir sampling)."""

    def __init__(self, limit: int) -> None:
        self._limit, self._num_seen, self._chance = limit, 0, random.Random(0)  # noqa: S311  examples, no secret
        self._kept: list[tuple[int, T]] = []

    def add(self, thing: T) -> None:
        """Offer an item."""
        number, self._num_seen = self._num_seen, self._num_seen + 1
        if number < self._limit:
            self._kept.append((number, thing))
        elif (index := self._chance.randrange(number + 1)) < self._limit:
            self._kept[index] = number, thing

    def kept(self) -> list[T]:
        """Return the sampled items in stream order."""
        return [thing for _, thing in sorted(self._kept, key=lambda numbered: numbered[0])]


def compare_rewards(
    first: RewardConfig,
    second: RewardConfig,
    items: Iterable[RewardItem],
    *,
    threshold: float | None,
    limit: int,
    report: Callable[[DifferenceCounts], None] = lambda _: None,
) -> Differences:
    """Score completions with two reward functions, in child processes with limits, and count the
    differences.

    Args:
        first: One reward function.
        second: The other.
        items: The completions to score.
        threshold: Rewards at or above it count as good, and only good and bad differ; None compares
            the rewards themselves.
        limit: Maximum number of examples, sampled uniformly; those that only one function could
            score come last.
        report: Called after each batch.
    Raises:
        ConfigError: As `RewardTrial`.
    """
    counts = DifferenceCounts()
    differing, half_failed = (
        ReservoirSampler[tuple[RewardItem, Result, Result]](limit),
        ReservoirSampler[tuple[RewardItem, Result, Result]](limit),
    )
    with RewardTrial(first) as mine, RewardTrial(second) as other:
        waiting = iter(items)
        while batch := list(islice(waiting, BATCH_ITEMS)):
            for case in zip(batch, mine.score(batch), other.score(batch), strict=True):
                if counts.add(case[1], case[2], threshold):
                    differing.add(case)
                elif isinstance(case[1], Score) != isinstance(case[2], Score):
                    half_failed.add(case)
            report(counts)
        cases = (differing.kept() + half_failed.kept())[:limit]
        examples = [
            Example(
                item.sample_id,
                item.completion[-END_CHARACTERS:],
                item.answer,
                mine.explain(item, one),
                other.explain(item, two),
            )
            for item, one, two in cases
        ]
        return Differences(mine.name, other.name, threshold, counts, examples)


def _differ(first: float, second: float, threshold: float | None) -> bool:
    if threshold is not None:
        return (first >= threshold) != (second >= threshold)
    return not math.isclose(first, second, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
