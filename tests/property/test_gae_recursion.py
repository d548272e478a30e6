"""Generalised advantages against the recursion that defines them, token by token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_events.algorithms.gae import GroupValues, discounted_sums, gae_advantages

LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=5).filter(max)
FACTOR = st.sampled_from([0.0, 0.5, 0.95, 0.999, 1.0])


def sampled(lengths: list[int], seed: int) -> GroupValues:
    generator = np.random.default_rng(seed)
    behind = np.arange(max(lengths)) >= np.array(lengths)[:, None]
    rewards, values = (
        np.where(behind, 0.0, generator.normal(0, 10, behind.shape)) for _ in range(2)
    )
    return GroupValues(rewards, values)


def by_recursion(
    rewards: list[float], values: list[float], gamma: float, gae_lambda: float
) -> list[float]:
    advantages, ahead, next_value = [], 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        ahead = reward + gamma * next_value - value + gamma * gae_lambda * ahead
        next_value = value
        advantages.append(ahead)
    return advantages[::-1]


@given(LENGTHS, FACTOR, FACTOR, st.integers(0, 2**32 - 1))
def test_advantages_equal_those_of_the_gae_recursion(
    lengths: list[int], gamma: float, gae_lambda: float, seed: int
) -> None:
    group = sampled(lengths, seed)
    given_rows = gae_advantages(group, gamma=gamma, gae_lambda=gae_lambda)
    for row, length in enumerate(lengths):
        expected = by_recursion(
            group.rewards[row, :length].tolist(),
            group.values[row, :length].tolist(),
            gamma,
            gae_lambda,
        )
        np.testing.assert_allclose(given_rows[row, :length], expected, rtol=1e-11, atol=1e-9)
        assert not given_rows[row, length:].any()


@given(LENGTHS, FACTOR, st.integers(0, 2**32 - 1), st.integers(1, 70))
def test_discounted_sums_of_a_row_do_not_depend_on_other_rows(
    lengths: list[int], factor: float, seed: int, num_zeros: int
) -> None:
    rows = sampled(lengths, seed).rewards
    together = discounted_sums(np.pad(rows, ((0, 0), (0, num_zeros))), factor=factor)
    for row, length in enumerate(lengths):
        alone = discounted_sums(rows[row : row + 1, :length], factor=factor)
        assert alone.tobytes() == together[row, :length].tobytes()


def test_discounted_sums_stay_finite_over_a_long_row() -> None:
    # Dividing by a cumulative product of 0.5 would overflow after a thousand tokens.
    sums = discounted_sums(np.ones((1, 100_000)), factor=0.5)
    np.testing.assert_allclose(sums[0, :-60], 2.0)
    assert sums[0, -1] == 1.0
    assert discounted_sums(np.ones((1, 100_000)), factor=1.0)[0, 0] == pytest.approx(100_000)
