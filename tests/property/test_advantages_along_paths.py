"""Advantages of samples with several paths against the same paths as samples, and those of samples
with one path against the lines that computed them before samples had paths.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_events.algorithms.advantage_estimator import AdvantageEstimator, RewardedSample
from relax_events.algorithms.gae import (
    GroupValues,
    discounted_returns,
    gae_advantages,
    rewards_by_loss_token,
)
from relax_events.algorithms.paths import turn_lengths
from relax_events.config import AlgorithmConfig

GAE = {"gamma": 0.97, "gae_lambda": 0.9}
SETTINGS = st.sampled_from(
    [
        {"name": "reinforce_plus_plus", "gamma": 0.9},
        {"name": "reinforce_plus_plus", "kl_coefficient": 0.1},
        {"name": "ppo", **GAE},
        {"name": "ppo", **GAE, "kl_coefficient": 0.1, "bootstrap_truncated": True},
        {"name": "ppo", **GAE, "turn_gamma": 0.7, "bootstrap_truncated": True},
        {"name": "ppo", **GAE, "length_adaptive_alpha": 0.3},
    ]
)
SEEDS = st.integers(0, 2**32 - 1)


def make_sample(generator: np.random.Generator, name: str, **more: Any) -> RewardedSample:
    """Make a sample with turns, some of whose tokens are not sampled, or none."""
    mask = (generator.random(generator.integers(1, 24)) < generator.random()).astype(np.uint8)
    mask[0] = 0
    columns = {
        column: generator.normal(size=len(mask)).astype(np.float32)
        for column in ("policy_logprobs", "ref_logprobs", "values")
    }
    return RewardedSample(
        sample_id=name,
        reward=float(generator.normal()),
        loss_mask=mask,
        components={},
        tokens=generator.integers(0, 2**30, len(mask)).astype(np.int32),
        **columns,
        **more,
    )


def by_sample(samples: list[RewardedSample], algorithm: AlgorithmConfig) -> list[np.ndarray]:
    """Compute the advantages as of a release whose rows were samples."""
    masks = [sample.loss_mask.astype(bool) for sample in samples]
    lengths = np.array([mask.sum() for mask in masks], np.int64)
    shape = len(samples), int(lengths.max())
    group = GroupValues(
        np.zeros(shape),
        np.zeros(shape),
        lengths,
        np.array([sample.is_truncated for sample in samples]),
        [turn_lengths(mask) for mask in masks],
    )
    for row, (sample, mask) in enumerate(zip(samples, masks, strict=True)):
        length = int(mask.sum())
        token_rewards = rewards_by_loss_token(
            sample.loss_mask,
            turn_rewards=sample.turn_rewards,
            token_rewards=sample.token_rewards,
            sample_id=sample.sample_id,
        )
        if algorithm.needs_critic:
            group.values[row, :length] = sample.values.astype(np.float64)[mask]
        if algorithm.has_reward_kl:
            difference = sample.policy_logprobs.astype(float) - sample.ref_logprobs.astype(float)
            penalties = algorithm.kl_coefficient * np.clip(
                difference, -algorithm.kl_limit, algorithm.kl_limit
            )
            group.rewards[row, :length] = -penalties[mask]
        if length:
            group.rewards[row, :length] += token_rewards
            group.rewards[row, length - 1] += sample.reward - token_rewards.sum()
    function = gae_advantages if algorithm.needs_critic else discounted_returns
    returned = function(group, **algorithm.keywords(algorithm.spec.advantage_settings))
    advantages = [np.zeros(len(mask), np.float32) for mask in masks]
    for estimated, mask, row_returned in zip(advantages, masks, returned, strict=True):
        estimated[mask] = row_returned[: int(mask.sum())]
    return advantages


@given(SETTINGS, SEEDS, st.integers(1, 5))
def test_samples_of_one_path_have_the_bits_that_they_had(
    settings: dict[str, Any], seed: int, number: int
) -> None:
    generator = np.random.default_rng(seed)
    samples = [make_sample(generator, str(index)) for index in range(number)]
    for index, sample in enumerate(samples):
        num_turns = len(turn_lengths(sample.loss_mask))
        samples[index] = replace(
            sample,
            is_truncated=bool(generator.integers(2)),
            turn_rewards=generator.normal(size=num_turns) if index % 2 else None,
            token_rewards=generator.normal(size=int(sample.loss_mask.sum())) if index % 3 else None,
        )
    algorithm = AlgorithmConfig.model_validate(settings)
    advantages = AdvantageEstimator(algorithm, max_new_tokens=16)(samples)
    for mine, expected in zip(advantages, by_sample(samples, algorithm), strict=True):
        assert mine.tobytes() == expected.tobytes()
    paths = [replace(sample, path_lengths=(len(sample.loss_mask),)) for sample in samples]
    for mine, expected in zip(
        AdvantageEstimator(algorithm, max_new_tokens=16)(paths), advantages, strict=True
    ):
        assert mine.tobytes() == expected.tobytes()


def joined(paths: list[RewardedSample], **more: Any) -> RewardedSample:
    """Return samples as the paths of one."""
    columns = {
        name: np.concatenate([getattr(path, name) for path in paths])
        for name in ("tokens", "loss_mask", "policy_logprobs", "ref_logprobs", "values")
    }
    lengths = tuple(len(path.loss_mask) for path in paths)
    return replace(paths[-1], **columns, path_lengths=lengths, **more)


@given(SETTINGS, SEEDS, st.integers(2, 5), st.booleans())
def test_paths_that_share_nothing_are_as_samples_of_the_same_reward(
    settings: dict[str, Any], seed: int, number: int, is_truncated: bool
) -> None:
    generator = np.random.default_rng(seed)
    paths = [replace(make_sample(generator, str(index)), reward=0.7) for index in range(number)]
    paths[-1] = replace(paths[-1], is_truncated=is_truncated)
    estimator = AdvantageEstimator(AlgorithmConfig.model_validate(settings), max_new_tokens=16)
    other = make_sample(generator, "other")
    together = estimator([other, joined(paths)])[1]
    np.testing.assert_array_equal(together, np.concatenate(estimator(paths)))


@given(SEEDS, st.integers(1, 4))
def test_turn_rewards_of_the_last_path_are_as_in_a_sample_of_its_own(
    seed: int, number: int
) -> None:
    generator = np.random.default_rng(seed)
    paths = [make_sample(generator, str(index)) for index in range(number + 1)]
    rewards = generator.normal(size=len(turn_lengths(paths[-1].loss_mask)))
    total = float(rewards.sum()) + 0.5
    alone = replace(paths[-1], turn_rewards=rewards, reward=total)
    estimator = AdvantageEstimator(AlgorithmConfig(name="reinforce_plus_plus"), max_new_tokens=16)
    together = estimator([joined(paths, turn_rewards=rewards, reward=total)])[0]
    expected = [estimator([replace(path, reward=total - rewards.sum())])[0] for path in paths[:-1]]
    expected.append(estimator([alone])[0])
    assert together == pytest.approx(np.concatenate(expected), rel=1e-6, abs=1e-6)
