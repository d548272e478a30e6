"""PPO's token advantages against numbers worked out by hand, and as the estimator returns them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from event_samples import ready

from relax_events.algorithms.advantage_estimator import AdvantageEstimator, RewardedSample
from relax_events.algorithms.gae import GroupValues, gae_advantages
from relax_events.config import AlgorithmConfig
from relax_events.config.algorithm_spec import AlgorithmSpec
from relax_events.errors import ConfigError, RewardError
from relax_events.training.batch.assembly import LocatedSample
from relax_events.training.replay.relabel import AdvantageRelabeller


def sample(
    name: str, reward: float, mask: list[int], values: list[float] | None, **more: Any
) -> RewardedSample:
    given = None if values is None else np.array(values, np.float32)
    return RewardedSample(
        sample_id=name,
        reward=reward,
        loss_mask=np.array(mask, np.uint8),
        components={},
        values=given,
        **more,
    )


def estimate(samples: list[RewardedSample], **settings: Any) -> list[list[float]]:
    algorithm = AlgorithmConfig.model_validate({"name": "ppo"} | settings)
    return [values.tolist() for values in AdvantageEstimator(algorithm, max_new_tokens=8)(samples)]


def test_advantages_of_three_tokens_worked_out_by_hand() -> None:
    # d = (0 + 0.9 * 0.4 - 0.5, 0 + 0.9 * 0.2 - 0.4, 1 - 0.2) = (-0.14, -0.22, 0.8); A2 = 0.8, A1 =
    # -0.22 + 0.45 * 0.8, A0 = -0.14 + 0.45 * A1
    group = GroupValues(np.array([[0.0, 0.0, 1.0]]), np.array([[0.5, 0.4, 0.2]]))
    assert gae_advantages(group, gamma=0.9, gae_lambda=0.5)[0].tolist() == pytest.approx(
        [-0.077, 0.14, 0.8]
    )


def test_lambda_interpolates_between_td_errors_and_return_minus_value() -> None:
    group = GroupValues(np.array([[0.0, 0.0, 1.0]]), np.array([[0.5, 0.4, 0.2]]))
    assert gae_advantages(group, gamma=1.0, gae_lambda=0.0)[0].tolist() == pytest.approx(
        [-0.1, -0.2, 0.8]
    )
    assert gae_advantages(group, gamma=1.0, gae_lambda=1.0)[0].tolist() == pytest.approx(
        [0.5, 0.6, 0.8]
    )


def test_gae_treats_the_loss_tokens_of_all_turns_as_one_sequence() -> None:
    # Observations between two turns are skipped, whatever their values are.
    apart = estimate(
        [sample("a", 1.0, [0, 1, 0, 0, 1], [9.0, 0.5, 9.0, 9.0, 0.25])], gamma=0.5, gae_lambda=0.5
    )
    # d = (0.5 * 0.25 - 0.5, 1 - 0.25), A1 = 0.75, A0 = -0.375 + 0.25 * 0.75
    assert apart == [[0.0, -0.1875, 0.0, 0.0, 0.75]]


def test_gae_of_a_sample_does_not_depend_on_others_of_its_group() -> None:
    samples = [
        sample("a", 1.0, [0, 1, 1], [0.0, 0.1, 0.2]),
        sample("b", -3.0, [0, 1], [0.0, 0.3]),
        sample("c", 2.0, [0, 0], [0.0, 0.0]),
    ]
    alone = [estimate([one])[0] for one in samples]
    assert estimate(samples) == alone
    assert alone[2] == [0.0, 0.0]


def test_kl_in_the_reward_is_applied_at_its_token() -> None:
    # k1 is the difference: 0.5 and -1 nats; with gamma = lambda = 1 and values 0 each token answers
    # for its own KL and what follows.
    logprobs = {
        "policy_logprobs": np.array([0.0, -1.0, -2.0], np.float32),
        "ref_logprobs": np.array([0.0, -1.5, -1.0], np.float32),
    }
    given = estimate(
        [sample("a", 1.0, [0, 1, 1], [0.0, 0.0, 0.0], **logprobs)],
        kl_coefficient=0.1,
        gae_lambda=1.0,
    )
    assert given[0] == pytest.approx([0.0, 1.0 + 0.1 - 0.05, 1.0 + 0.1])


def test_sample_without_values_is_named() -> None:
    with pytest.raises(
        RewardError, match=r"sample b lacks the critic's values; is the critic role running"
    ):
        estimate([sample("a", 1.0, [0, 1], [0.0, 0.1]), sample("b", 1.0, [0, 1], None)])
    with pytest.raises(
        RewardError,
        match=r"sample a: the critic's values must be finite, one for each of 2 tokens, got shape \(1,\)",
    ):
        estimate([sample("a", 1.0, [0, 1], [0.1])])
    with pytest.raises(RewardError, match=r"sample a: the critic's values must be finite"):
        estimate([sample("a", 1.0, [0, 1], [0.0, float("nan")])])


def test_custom_advantage_function_must_return_a_value_for_every_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = AlgorithmSpec(
        name="mine",
        summary="",
        formula="",
        source="",
        advantage=lambda group: group.rewards.sum(axis=1),
        policy_loss=lambda tokens: tokens.advantages,
        settings={"gae_lambda": 1.0},
    )
    monkeypatch.setattr("relax_events.config.algorithm.find_algorithm", lambda name: spec)
    with pytest.raises(
        ConfigError,
        match=r"its advantage must return numbers of shape \(1, 2\), one for each token, got shape \(1,\)",
    ):
        AdvantageEstimator(AlgorithmConfig(name="mine"), max_new_tokens=8)(
            [sample("a", 1.0, [0, 1, 1], [0.0, 0.0, 0.0])]
        )


def test_truncated_sample_is_bootstrapped_with_the_value_at_its_last_token() -> None:
    # Errors 0.5 * 0.25 - 0.5 = -0.375 and 1 + 0.5 * 0.25 - 0.25 = 0.875; lambda 0.5: A0 = -0.375 +
    # 0.25 * 0.875.
    given = [
        sample("a", 1.0, [0, 1, 1], [0.0, 0.5, 0.25], is_truncated=True),
        sample("b", 1.0, [0, 1, 1], [0.0, 0.5, 0.25]),
    ]
    cut_off, ended = estimate(given, gamma=0.5, gae_lambda=0.5, bootstrap_truncated=True)
    assert (cut_off, ended) == ([0.0, -0.15625, 0.875], [0.0, -0.1875, 0.75])
    assert estimate(given, gamma=0.5, gae_lambda=0.5) == [ended, ended]
    empty = sample("c", 1.0, [0, 0], [0.0, 0.0], is_truncated=True)
    assert estimate([*given, empty], bootstrap_truncated=True)[2] == [0.0, 0.0]
    group = GroupValues(np.zeros((1, 2)), np.zeros((1, 2)), is_truncated=np.array([True]))
    with pytest.raises(RewardError, match="need the number of loss tokens of each path, got none"):
        gae_advantages(group, gamma=1.0, gae_lambda=1.0, bootstrap_truncated=True)


def test_advantages_propagate_along_each_path_of_a_sample() -> None:
    """A short path that the critic expects little of, and a long one that it expects much of: each
    gets what it gets as an episode of its own. Errors are 0 but for the last tokens', reward - value,
    which lambda 0.95 carries back."""
    branched = sample(
        "a",
        1.0,
        [0, *[1] * 5, 0, 0, *[1] * 300],
        [9.0, *[0.2] * 5, 9.0, 9.0, *[0.9] * 300],
        path_lengths=(6, 302),
    )
    [advantages] = estimate([branched], gae_lambda=0.95)
    assert advantages[:6] == pytest.approx([0.0, 0.651605, 0.6859, 0.722, 0.76, 0.8], rel=1e-6)
    expected = [0.1 * 0.95**distance for distance in range(300)][::-1]
    assert advantages[6:8] == [0.0, 0.0]
    assert advantages[8:] == pytest.approx(expected, rel=1e-5)


def test_kl_of_a_path_lessens_no_token_of_another() -> None:
    # k1 is 1 nat at each token, gamma 1: what a token answers for is its own path's rest.
    one = RewardedSample(
        sample_id="a",
        reward=4.0,
        loss_mask=np.array([0, 1, 1, 0, 1], np.uint8),
        components={},
        policy_logprobs=np.array([0, -1, -1, 0, -1], np.float32),
        ref_logprobs=np.array([0, -2, -2, 0, -2], np.float32),
        path_lengths=(3, 2),
    )
    algorithm = AlgorithmConfig(name="reinforce_plus_plus", kl_coefficient=0.5)
    [returns] = AdvantageEstimator(algorithm, max_new_tokens=8)([one])
    assert returns.tolist() == [0.0, 3.0, 3.5, 0.0, 3.5]


def test_bootstrap_is_at_the_end_of_the_path_that_was_cut_off() -> None:
    # The last turn was cut off, which is that of the last path. Gamma and lambda 0.5: the first
    # path's errors are -0.375 and 0.75, the second's 1 + 0.5 * 0.25 - 0.25.
    one = sample(
        "a",
        1.0,
        [0, 1, 1, 0, 1],
        [0.0, 0.5, 0.25, 0.0, 0.25],
        path_lengths=(3, 2),
        is_truncated=True,
    )
    settings = {"gamma": 0.5, "gae_lambda": 0.5, "bootstrap_truncated": True}
    assert estimate([one], **settings) == [[0.0, -0.1875, 0.75, 0.0, 0.875]]
    first = replace(one, is_truncated=False, truncated_paths=(0,))
    assert estimate([first], **settings) == [[0.0, -0.15625, 0.875, 0.0, 0.75]]


def test_lambda_adapts_to_the_length_of_each_sample() -> None:
    """alpha 0.5: a sample of 4 loss tokens has lambda 1 - 1 / 2 = 0.5, one of 2 has 0; the shorter
    has none below 0."""
    generator = np.random.default_rng(5)
    lengths, values = [4, 2, 1], generator.normal(size=(3, 4))
    given = [
        sample(str(row), 1.0, [1] * length, values[row, :length].tolist())
        for row, length in enumerate(lengths)
    ]
    adapted = estimate(given, gamma=0.9, length_adaptive_alpha=0.5)
    for row, own in enumerate([0.5, 0.0, 0.0]):
        assert adapted[row] == estimate([given[row]], gamma=0.9, gae_lambda=own)[0]
        recorded = values[row, : lengths[row]].astype(np.float32).astype(float)
        errors = (
            np.append(np.zeros(lengths[row] - 1), 1.0)
            + 0.9 * np.append(recorded[1:], 0.0)
            - recorded
        )
        expected = [
            sum((0.9 * own) ** (u - t) * errors[u] for u in range(t, lengths[row]))
            for t in range(lengths[row])
        ]
        assert adapted[row] == pytest.approx(expected, rel=1e-6)


def test_critic_returns_are_recomputed_with_its_own_lambda() -> None:
    """With lambda 1 and gamma 1 its returns are the reward at every loss token, for any values."""
    values = np.array([0.0, 0.5, 0.25], np.float32)
    recorded = ready(tokens=np.array([1, 2, 3], np.int32), loss_mask=np.array([0, 1, 1], np.uint8), values=values, reward=2.0,
                     rollout_logprobs=np.zeros(3, np.float32), advantages=np.array([0, 9, 9], np.float32))  # fmt: skip
    algorithm = AlgorithmConfig.model_validate(
        {"name": "ppo", "critic_gae_lambda": 1.0, "length_adaptive_alpha": 0.05}
    )
    assert algorithm.of_critic is not None
    [learned] = AdvantageRelabeller(algorithm.of_critic, max_new_tokens=8)(
        [LocatedSample(recorded, 0, 0)]
    )
    assert (learned.sample.advantages + values).tolist() == [0.0, 2.0, 2.0]


def test_critic_reuses_policy_advantages_when_their_settings_are_equal() -> None:
    assert AlgorithmConfig(name="ppo").of_critic is None
    assert AlgorithmConfig().of_critic is None
    assert AlgorithmConfig(name="ppo", critic_gae_lambda=0.95).of_critic is None
    adaptive = AlgorithmConfig(name="ppo", length_adaptive_alpha=0.05).of_critic
    assert adaptive is not None
    assert (adaptive.gae_lambda, adaptive.length_adaptive_alpha) == (0.95, 0.0)


@pytest.mark.parametrize(
    ("gamma", "expected"), [(1.0, [4.0, 0.0, 4.0, 4.0]), (0.5, [1.0, 0.0, 2.0, 4.0])]
)
def test_returns_are_discounted_once_per_loss_token(gamma: float, expected: list[float]) -> None:
    # The masked token between two turns is no step.
    one = RewardedSample(
        sample_id="a", reward=4.0, loss_mask=np.array([1, 0, 1, 1], np.uint8), components={}
    )
    algorithm = AlgorithmConfig(name="reinforce_plus_plus", gamma=gamma)
    assert AdvantageEstimator(algorithm, max_new_tokens=8)([one])[0].tolist() == expected


def test_discounted_returns_with_kl_are_those_of_the_recursion() -> None:
    generator = np.random.default_rng(6)
    policy, reference = generator.normal(size=(2, 7)).astype(np.float32)
    one = RewardedSample(
        sample_id="a",
        reward=1.5,
        loss_mask=np.ones(7, np.uint8),
        components={},
        policy_logprobs=policy,
        ref_logprobs=reference,
    )
    algorithm = AlgorithmConfig(name="reinforce_plus_plus", gamma=0.8, kl_coefficient=0.1)
    expected, ahead = [], 0.0
    for index in reversed(range(7)):
        ahead = (
            -0.1 * (float(policy[index]) - float(reference[index]))
            + (1.5 if index == 6 else 0.0)
            + 0.8 * ahead
        )
        expected.append(ahead)
    assert AdvantageEstimator(algorithm, max_new_tokens=8)([one])[0].tolist() == pytest.approx(
        expected[::-1], rel=1e-6
    )


def test_teacher_log_ratio_is_subtracted_from_discounted_returns() -> None:
    said = {
        "policy_logprobs": np.array([-1.0, -1.0], np.float32),
        "teacher_logprobs": np.array([-2.0, -0.5], np.float32),
    }
    one = RewardedSample(
        sample_id="a", reward=1.0, loss_mask=np.ones(2, np.uint8), components={}, **said
    )
    algorithm = AlgorithmConfig(
        name="reinforce_plus_plus",
        gamma=0.5,
        distill_coefficient=1.0,
        distill_placement="advantage",
    )
    assert AdvantageEstimator(algorithm, max_new_tokens=8)([one])[0].tolist() == [
        0.5 - 1.0,
        1.0 + 0.5,
    ]
