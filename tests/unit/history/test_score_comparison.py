"""The comparison of two reward functions: metrics worked out by hand, and ranks against their
definition.
"""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_events.history.samples.score_comparison import (
    Comparison,
    ScoreComparison,
    ScoredPair,
    correlation,
    ranks,
)


def compare(*groups: list[tuple[float | None, float | None]], threshold: float = 0.5) -> Comparison:
    comparison = ScoreComparison(threshold=threshold)
    for number, group in enumerate(groups):
        comparison.add_group(
            [
                ScoredPair(f"{number}/{index}", 0, *pair, completion="text")
                for index, pair in enumerate(group)
            ]
        )
    return comparison.result()


def test_score_comparison_metrics_match_hand_computation() -> None:
    result = compare([(0.0, 0.5), (1.0, 1.0)], [(0.0, 0.0), (1.0, 0.5)])
    assert (result.num_samples, result.num_compared) == (4, 4)
    assert (result.original_mean, result.new_mean) == (0.5, 0.5)
    assert result.mean_absolute_difference == 0.25
    # deviations -.5 .5 -.5 .5 and 0 .5 -.5 0: covariance .5, squares 1 and .5
    assert result.pearson == pytest.approx(0.5 / math.sqrt(1 * 0.5))
    # ranks 1.5 3.5 1.5 3.5 and 2.5 4 1 2.5: deviations -1 1 -1 1 and 0 1.5 -1.5 0, covariance 3,
    # squares 4 and 4.5
    assert result.spearman == pytest.approx(3 / math.sqrt(4 * 4.5))
    assert result.agreement_ratio == 0.75
    assert (result.num_prompt_groups, result.num_reranked) == (2, 0)


def test_failures_are_ratios_of_all_samples_and_excluded_from_other_metrics() -> None:
    result = compare([(0.0, None), (1.0, 1.0)], [(None, 1.0), (None, None)])
    assert (result.original_failed_ratio, result.new_failed_ratio) == (0.5, 0.5)
    assert (result.num_samples, result.num_compared, result.num_prompt_groups) == (4, 1, 0)
    assert (result.original_mean, result.pearson) == (1.0, None)


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


def test_samples_that_differ_most_come_first() -> None:
    result = compare([(0.0, index / 20) for index in range(21)])
    assert [pair.new for pair in result.extremes] == [index / 20 for index in range(20, 10, -1)]
    assert result.extremes[0] == ScoredPair("0/20", 0, 0.0, 1.0, "text")


def test_equal_scores_have_no_extremes() -> None:
    result = compare([(0.25, 0.25), (0.75, 0.75)])
    assert (result.extremes, result.pearson, result.spearman, result.agreement_ratio) == (
        [],
        pytest.approx(1),
        pytest.approx(1),
        1.0,
    )


def test_comparison_without_samples_has_no_metrics() -> None:
    result = compare()
    assert (
        result.num_samples,
        result.original_mean,
        result.pearson,
        result.agreement_ratio,
        result.new_failed_ratio,
    ) == (0, None, None, None, None)


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
