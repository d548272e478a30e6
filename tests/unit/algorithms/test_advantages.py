"""Normalisation within prompt groups against numbers worked out by hand."""

import math

import numpy as np
import pytest

from relax_events.algorithms.advantages import normalise_prompt_groups


def test_normalise_prompt_groups_divides_by_the_sample_standard_deviation():
    # Mean 2, squared deviations 1 + 0 + 1, n - 1 = 2: deviation 1.
    advantages = normalise_prompt_groups(np.array([[1.0, 2.0, 3.0]]), eps=0.0)
    np.testing.assert_allclose(advantages, [[-1.0, 0.0, 1.0]], rtol=1e-7)


def test_normalise_prompt_groups_adds_eps_to_the_standard_deviation():
    # One success in four: mean 1/4, deviation sqrt((9/16 + 3/16) / 3) = 1/2.
    advantages = normalise_prompt_groups(np.array([[1.0, 0.0, 0.0, 0.0]]), eps=0.5)
    np.testing.assert_allclose(advantages, [[0.75, -0.25, -0.25, -0.25]], rtol=1e-6)


def test_normalise_prompt_groups_only_centres_without_normalise_std():
    advantages = normalise_prompt_groups(np.array([[10.0, 20.0], [3.0, 1.0]]), normalise_std=False)
    np.testing.assert_array_equal(advantages, [[-5.0, 5.0], [1.0, -1.0]])


def test_normalise_prompt_groups_treats_each_row_separately():
    advantages = normalise_prompt_groups(np.array([[0.0, 1.0], [0.0, 100.0]]), eps=0.0)
    np.testing.assert_allclose(advantages, [[-math.sqrt(0.5), math.sqrt(0.5)]] * 2, rtol=1e-6)


@pytest.mark.parametrize("normalise_std", [True, False])
def test_normalise_prompt_groups_gives_exact_zeros_when_all_are_equal(normalise_std: bool):
    # The mean of seven 0.1 is not 0.1 in binary; divided by eps the rest would be noise.
    advantages = normalise_prompt_groups(np.full((1, 7), 0.1), normalise_std=normalise_std)
    np.testing.assert_array_equal(advantages, np.zeros((1, 7)))


def test_normalise_prompt_groups_gives_zero_for_a_single_sample():
    np.testing.assert_array_equal(normalise_prompt_groups(np.array([[3.0]])), [[0.0]])
