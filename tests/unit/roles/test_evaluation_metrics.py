"""Metrics of an evaluation against numbers worked out by hand and by enumeration."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from relax_events.roles.evaluation_metrics import EvaluationResults, pass_at_k


@pytest.mark.parametrize(
    ("num_samples", "num_passed", "k", "expected"),
    [
        (4, 1, 1, 1 / 4),
        (4, 1, 2, 1 / 2),  # 1 - C(3, 2) / C(4, 2) = 1 - 3 / 6
        (5, 2, 3, 9 / 10),  # 1 - C(3, 3) / C(5, 3) = 1 - 1 / 10
        (10, 0, 5, 0.0),
        (10, 6, 5, 1.0),  # with four failures any five hold a pass
        (1, 1, 1, 1.0),
        (200, 1, 100, 1 / 2),
    ],
)
def test_pass_at_k_is_as_computed_by_hand(
    num_samples: int, num_passed: int, k: int, expected: float
) -> None:
    assert pass_at_k(num_samples, num_passed, k=k) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("num_passed", range(8))
def test_pass_at_k_is_the_fraction_of_combinations_with_a_pass(num_passed: int) -> None:
    samples = [index < num_passed for index in range(7)]
    for k in range(1, 8):
        choices = [any(chosen) for chosen in combinations(samples, k)]
        assert pass_at_k(7, sum(samples), k=k) == pytest.approx(
            sum(choices) / len(choices), abs=1e-15
        )


@pytest.mark.parametrize(
    ("num_samples", "num_passed", "k"), [(4, 5, 1), (4, -1, 1), (4, 1, 5), (4, 1, 0)]
)
def test_pass_at_k_rejects_inconsistent_counts(num_samples: int, num_passed: int, k: int) -> None:
    with pytest.raises(ValueError, match=rf"got {num_passed} of {num_samples} and k = {k}"):
        pass_at_k(num_samples, num_passed, k=k)


def test_evaluation_results_compute_the_metrics_of_their_samples() -> None:
    rewards = {0: [1.0, 0.0, 0.0, 0.5], 1: [1.0, 1.0, 1.0, 1.0], 2: [0.0, 0.0, 0.0, 0.0]}
    tally = EvaluationResults(pass_reward=0.5)
    for row, values in rewards.items():
        for index, reward in enumerate(values):
            tally.add_sample(
                row, reward=reward, num_tokens=10 * row + index, is_truncated=index == 3
            )
    means = np.array([np.mean(values) for values in rewards.values()])
    assert tally.reward_mean == pytest.approx(means.mean())
    assert tally.reward_stderr == pytest.approx(means.std(ddof=1) / np.sqrt(3))
    assert tally.completion_tokens_mean == pytest.approx(
        np.mean([10 * row + index for row in rewards for index in range(4)])
    )
    assert (tally.num_truncated, tally.num_unscored) == (3, 0)
    # Of prompt 0 two of four pass: 1 - C(2, 2) / C(4, 2) = 5 / 6.
    assert tally.pass_at([1, 2]) == {
        "1": pytest.approx((2 / 4 + 1 + 0) / 3),
        "2": pytest.approx((5 / 6 + 1 + 0) / 3),
    }


def test_evaluation_results_exclude_unscored_samples() -> None:
    tally = EvaluationResults(pass_reward=1.0)
    for row, reward in [(0, 1.0), (0, None), (1, 0.0), (1, 1.0)]:
        tally.add_sample(row, reward=reward, num_tokens=1, is_truncated=False)
    assert (tally.num_unscored, tally.reward_mean) == (1, 0.75)
    assert tally.pass_at([1, 2]) == {"1": 0.75, "2": 1.0}  # only prompt 1 has two scored samples


def test_empty_evaluation_results_have_no_metrics() -> None:
    tally = EvaluationResults(pass_reward=1.0)
    assert (
        tally.reward_mean,
        tally.reward_stderr,
        tally.completion_tokens_mean,
        tally.pass_at([1]),
    ) == (None, None, None, {})
