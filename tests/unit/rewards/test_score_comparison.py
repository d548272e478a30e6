"""The comparison of two scorings: metrics worked out by hand, and ranks against their
definition.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_events.errors import RewardError
from relax_events.events.types import SampleRolledOut
from relax_events.rewards.comparison import Comparison, compare_scores, correlation, ranks
from relax_events.rewards.pool import RewardItem
from relax_events.rewards.scores import Score
from relax_events.rewards.trial import Completion, Result, ScoredCompletion, describe_result
from tests.event_samples import changed, rolled_out

Pair = tuple[float | None, float | None]
TEXT = rolled_out("000000-0000-0")


class Recorded:
    """Returns one reward after the other."""

    name = "recorded"

    def __init__(self, rewards: list[float | None]) -> None:
        self._rewards = iter(rewards)

    def score(self, batch: Sequence[Completion]) -> list[Result]:
        return [to_result(next(self._rewards)) for _ in batch]

    def describe(self, item: RewardItem, result: Result) -> ScoredCompletion:
        return describe_result(item, result)


def to_result(reward: float | None) -> Result:
    return RewardError("no") if reward is None else Score(reward, {})


def sample_of(size: int) -> SampleRolledOut:
    return changed(TEXT, key=replace(TEXT.key, samples_per_prompt=size))


def compare(*groups: list[Pair], threshold: float | None = 0.5, limit: int = 10) -> Comparison:
    batch = [
        Completion(
            RewardItem(f"{number}/{index}", "text", prompt_group_id=str(number)),
            sample_of(len(group)),
        )
        for number, group in enumerate(groups)
        for index in range(len(group))
    ]
    first, second = ([pair[side] for group in groups for pair in group] for side in (0, 1))
    return compare_scores(
        [batch], Recorded(first), Recorded(second), threshold=threshold, num_examples=limit
    )


def test_score_comparison_metrics_match_hand_computation() -> None:
    result = compare([(0.0, 0.5), (1.0, 1.0)], [(0.0, 0.0), (1.0, 0.5)])
    assert (result.num_samples, result.num_compared) == (4, 4)
    assert (result.first_mean, result.second_mean) == (0.5, 0.5)
    assert result.mean_absolute_difference == 0.25
    # deviations -.5 .5 -.5 .5 and 0 .5 -.5 0: covariance .5, squares 1 and .5
    assert result.pearson == pytest.approx(0.5 / math.sqrt(1 * 0.5))
    # ranks 1.5 3.5 1.5 3.5 and 2.5 4 1 2.5: deviations -1 1 -1 1 and 0 1.5 -1.5 0, covariance 3,
    # squares 4 and 4.5
    assert result.spearman == pytest.approx(3 / math.sqrt(4 * 4.5))
    assert (result.num_agree, result.num_differ) == (3, 1)
    assert (result.num_prompt_groups, result.num_reranked) == (2, 0)


def test_failures_are_counted_and_excluded_from_other_metrics() -> None:
    result = compare([(0.0, None), (1.0, 1.0)], [(None, 1.0), (None, None)])
    assert (result.num_first_failed, result.num_second_failed, result.num_both_failed) == (2, 2, 1)
    assert (result.num_samples, result.num_compared, result.num_prompt_groups) == (4, 1, 0)
    assert (result.num_agree, result.num_differ) == (1, 0)
    assert (result.first_mean, result.pearson) == (1.0, None)


@pytest.mark.parametrize(
    ("first", "second", "threshold", "do_differ"),
    [
        (0.1 + 0.2, 0.3, None, False),
        (0.0, 1.0, None, True),
        (-1.0, 0.0, None, True),
        (-1.0, 0.0, 0.5, False),
        (0.5, 0.4, 0.5, True),
    ],
)
def test_rewards_differ_by_value_or_by_side_of_the_threshold(
    first: float, second: float, threshold: float | None, do_differ: bool
) -> None:
    result = compare([(first, second)], threshold=threshold)
    assert (result.num_agree, result.num_differ) == (not do_differ, do_differ)
    assert (result.num_first_higher, result.num_second_higher) == (
        do_differ and first > second,
        do_differ and second > first,
    )


def test_reranked_and_newly_informative_prompt_groups_are_counted() -> None:
    result = compare(
        [(0.0, 0.2), (1.0, 0.4)],  # the same order
        [(0.0, 0.4), (1.0, 0.2)],  # turned round
        [(0.0, 0.3), (1.0, 0.3)],  # nothing left to learn from
        [(0.5, 0.0), (0.5, 1.0)],  # something to learn from now
        [(0.5, 0.1), (0.5, 0.1)],  # as equal as before
    )
    assert (result.num_prompt_groups, result.num_reranked) == (5, 3)
    assert (result.num_became_informative, result.num_became_uninformative) == (1, 1)


def test_samples_that_differ_most_come_first_and_half_failed_ones_last() -> None:
    pairs: list[Pair] = [(0.0, index / 20) for index in range(21)]
    result = compare(pairs, threshold=None)
    assert [one.second.reward for one in result.examples] == [i / 20 for i in range(20, 10, -1)]
    best = result.examples[0]
    assert (best.sample_id, best.completion_end, best.first.reward) == ("0/20", "text", 0.0)
    result = compare([(0.0, None), (None, None), (0.0, 0.1)], threshold=None)
    assert [one.sample_id for one in result.examples] == ["0/2", "0/0"]
    assert result.examples[1].second.error == "no"
    assert compare(pairs, limit=0).examples == []


def test_examples_are_chosen_evenly_from_equal_differences() -> None:
    result = compare([(0.0, 1.0)] * 10_000, limit=100)
    numbers = [int(one.sample_id.partition("/")[2]) for one in result.examples]
    assert len(set(numbers)) == 100
    # Of 100 numbers that are chosen evenly some 50 lie in either half; 25 is five standard
    # deviations away.
    assert 25 <= sum(number < 5_000 for number in numbers) <= 75


def test_incomplete_prompt_group_counts_at_the_end() -> None:
    batch = [Completion(RewardItem("0/0", "", prompt_group_id="0"), sample_of(2))]
    scorers = Recorded([1.0]), Recorded([1.0])
    result = compare_scores([batch], *scorers, threshold=None, num_examples=0)
    assert (result.num_prompt_groups, result.num_reranked) == (1, 0)


def test_equal_scores_have_no_examples() -> None:
    result = compare([(0.25, 0.25), (0.75, 0.75)])
    assert (result.examples, result.pearson, result.spearman, result.num_agree) == (
        [],
        pytest.approx(1),
        pytest.approx(1),
        2,
    )


def test_comparison_without_samples_has_no_metrics() -> None:
    result = compare()
    assert (result.num_samples, result.first_mean, result.pearson) == (0, None, None)
    assert result.mean_absolute_difference is None


@pytest.mark.parametrize("values", [[], [1.0], [2.0, 2.0, 2.0]])
def test_correlation_with_a_constant_is_undefined(values: list[float]) -> None:
    other = np.arange(len(values), dtype=np.float64)
    assert correlation(np.array(values), other) is None
    assert correlation(other, np.array(values)) is None


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30))
def test_equal_values_share_their_mean_rank(values: list[int]) -> None:
    ordered = sorted(values)
    expected = [
        statistics.mean(rank for rank, other in enumerate(ordered, 1) if other == value)
        for value in values
    ]
    assert ranks(np.array(values, np.float64)).tolist() == pytest.approx(expected)


@given(st.lists(st.tuples(st.integers(-9, 9), st.integers(-9, 9)), min_size=2, max_size=30))
def test_correlation_agrees_with_the_standard_library(pairs: list[tuple[int, int]]) -> None:
    first, second = ([float(value) for value in column] for column in zip(*pairs, strict=True))
    found = correlation(np.array(first), np.array(second))
    if len(set(first)) > 1 and len(set(second)) > 1:
        assert found == pytest.approx(statistics.correlation(first, second), abs=1e-12)
    else:
        assert found is None
