"""PPO's advantages of tokens: numbers worked out by hand, and what the judge makes of samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from relax_events.algorithms.gae import GroupValues, generalised_advantages
from relax_events.algorithms.judging import Judge, RewardedSample
from relax_events.config import AlgorithmConfig
from relax_events.config.algorithm_spec import AlgorithmSpec
from relax_events.errors import ConfigError, RewardError


def sample(name: str, reward: float, mask: list[int], values: list[float] | None, **more: Any) -> RewardedSample:
    given = None if values is None else np.array(values, np.float32)
    return RewardedSample(sample_id=name, reward=reward, loss_mask=np.array(mask, np.uint8), components={}, values=given, **more)


def judged(samples: list[RewardedSample], **settings: Any) -> list[list[float]]:
    algorithm = AlgorithmConfig.model_validate({"name": "ppo"} | settings)
    return [values.tolist() for values in Judge(algorithm, max_new_tokens=8)(samples)]


def test_advantages_of_three_tokens_worked_out_by_hand() -> None:
    # d = (0 + 0.9 * 0.4 - 0.5, 0 + 0.9 * 0.2 - 0.4, 1 - 0.2) = (-0.14, -0.22, 0.8); A2 = 0.8, A1 = -0.22 + 0.45 * 0.8, A0 = -0.14 + 0.45 * A1
    group = GroupValues(np.array([[0.0, 0.0, 1.0]]), np.array([[0.5, 0.4, 0.2]]))
    assert generalised_advantages(group, gamma=0.9, gae_lambda=0.5)[0].tolist() == pytest.approx([-0.077, 0.14, 0.8])


def test_lambda_goes_from_one_step_errors_to_what_came_less_the_value() -> None:
    group = GroupValues(np.array([[0.0, 0.0, 1.0]]), np.array([[0.5, 0.4, 0.2]]))
    assert generalised_advantages(group, gamma=1.0, gae_lambda=0.0)[0].tolist() == pytest.approx([-0.1, -0.2, 0.8])
    assert generalised_advantages(group, gamma=1.0, gae_lambda=1.0)[0].tolist() == pytest.approx([0.5, 0.6, 0.8])


def test_turns_are_one_row_of_loss_tokens() -> None:
    # What other parties wrote between two turns is passed over, whatever stands in its values.
    apart = judged([sample("a", 1.0, [0, 1, 0, 0, 1], [9.0, 0.5, 9.0, 9.0, 0.25])], gamma=0.5, gae_lambda=0.5)
    # d = (0.5 * 0.25 - 0.5, 1 - 0.25), A1 = 0.75, A0 = -0.375 + 0.25 * 0.75
    assert apart == [[0.0, -0.1875, 0.0, 0.0, 0.75]]


def test_samples_of_a_group_do_not_look_at_each_other() -> None:
    samples = [sample("a", 1.0, [0, 1, 1], [0.0, 0.1, 0.2]), sample("b", -3.0, [0, 1], [0.0, 0.3]), sample("c", 2.0, [0, 0], [0.0, 0.0])]
    alone = [judged([one])[0] for one in samples]
    assert judged(samples) == alone
    assert alone[2] == [0.0, 0.0]


def test_kl_in_the_reward_stands_at_its_token() -> None:
    # k1 is the difference: 0.5 and -1 nats; with gamma = lambda = 1 and values 0 each token answers for its own KL and what follows.
    logprobs = {"policy_logprobs": np.array([0.0, -1.0, -2.0], np.float32), "ref_logprobs": np.array([0.0, -1.5, -1.0], np.float32)}
    given = judged([sample("a", 1.0, [0, 1, 1], [0.0, 0.0, 0.0], **logprobs)], kl_coefficient=0.1, gae_lambda=1.0)
    assert given[0] == pytest.approx([0.0, 1.0 + 0.1 - 0.05, 1.0 + 0.1])


def test_sample_without_values_is_named() -> None:
    with pytest.raises(RewardError, match=r"sample b lacks the critic's values; is the critic role running"):
        judged([sample("a", 1.0, [0, 1], [0.0, 0.1]), sample("b", 1.0, [0, 1], None)])
    with pytest.raises(RewardError, match=r"sample a: the critic's values must be finite, one for each of 2 tokens, got shape \(1,\)"):
        judged([sample("a", 1.0, [0, 1], [0.1])])
    with pytest.raises(RewardError, match=r"sample a: the critic's values must be finite"):
        judged([sample("a", 1.0, [0, 1], [0.0, float("nan")])])


def test_advantage_of_ones_own_must_judge_every_token(monkeypatch: pytest.MonkeyPatch) -> None:
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
    with pytest.raises(ConfigError, match=r"its advantage must give finite numbers of shape \(1, 2\), one for each token, got shape \(1,\)"):
        Judge(AlgorithmConfig(name="mine"), max_new_tokens=8)([sample("a", 1.0, [0, 1, 1], [0.0, 0.0, 0.0])])
