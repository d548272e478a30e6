"""Advantages of a prompt group's tokens against numbers worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax_events.algorithms.advantage_estimator import (
    AdvantageEstimator,
    RewardedSample,
    overlong_penalties,
)
from relax_events.algorithms.advantages import (
    GroupRewards,
    centred_advantages,
    gdpo_advantages,
)
from relax_events.algorithms.description import installed_algorithms
from relax_events.config import AlgorithmConfig
from relax_events.errors import ConfigError, RewardError

MASKS = [[0, 1, 1, 0, 1], [0, 0, 1], [0, 1, 1]]


def samples(
    rewards: list[float],
    components: list[dict[str, float]] | None = None,
    *,
    with_logprobs: bool = False,
) -> list[RewardedSample]:
    made = []
    for index, (reward, mask) in enumerate(zip(rewards, MASKS, strict=False)):
        policy = np.array([0.0, -1.0, -2.0, 9.0, -0.5][: len(mask)], np.float32)
        reference = np.array([0.0, -1.5, -1.0, 3.0, -2.5][: len(mask)], np.float32)
        extra = (
            {"policy_logprobs": policy, "ref_logprobs": reference, "teacher_logprobs": reference}
            if with_logprobs
            else {}
        )
        parts = components[index] if components else {}
        made.append(
            RewardedSample(
                sample_id=f"s{index}",
                reward=reward,
                loss_mask=np.array(mask, np.uint8),
                components=parts,
                **extra,
            )
        )
    return made


def estimate(
    given: list[RewardedSample], max_new_tokens: int = 8, **settings: Any
) -> list[list[float]]:
    algorithm = AlgorithmConfig.model_validate(settings)
    return [
        values.tolist()
        for values in AdvantageEstimator(algorithm, max_new_tokens=max_new_tokens)(given)
    ]


def test_centred_advantages_subtract_the_group_mean() -> None:
    assert centred_advantages(GroupRewards(np.array([1.0, 2.0, 6.0]))).tolist() == [-2.0, -1.0, 3.0]


def test_gdpo_normalises_components_separately_and_sums_them_by_weight() -> None:
    components = {
        "right": np.array([1.0, 0.0, 1.0, 0.0]),
        "form": np.array([10.0, 10.0, 30.0, 30.0]),
        "same": np.ones(4),
    }
    rewards = GroupRewards(np.zeros(4), components)
    unit = 0.5 / np.sqrt(1 / 3)  # deviation with n - 1 of two zeros and two ones
    plain = gdpo_advantages(rewards, normalise_std=True, reward_weights={})
    assert plain.tolist() == pytest.approx([0.0, -2 * unit, 2 * unit, 0.0], rel=1e-5, abs=1e-5)
    weighted = gdpo_advantages(
        rewards, normalise_std=True, reward_weights={"right": 1.0, "form": 0.5}
    )
    assert weighted.tolist() == pytest.approx(
        [0.5 * unit, -1.5 * unit, 1.5 * unit, -0.5 * unit], rel=1e-5
    )
    assert gdpo_advantages(rewards, normalise_std=False, reward_weights={"form": 1.0}).tolist() == [
        -10.0,
        -10.0,
        10.0,
        10.0,
    ]


def test_missing_reward_components_are_named() -> None:
    with pytest.raises(RewardError, match="there are no reward components"):
        gdpo_advantages(GroupRewards(np.zeros(2)), normalise_std=True, reward_weights={})
    with pytest.raises(
        RewardError,
        match=r"reward_weights names 'style', which is not a component of the reward; components are form, right",
    ):
        gdpo_advantages(
            GroupRewards(np.zeros(2), {"right": np.ones(2), "form": np.ones(2)}),
            normalise_std=True,
            reward_weights={"style": 1.0},
        )
    with pytest.raises(
        RewardError,
        match="sample s1 has the reward components none, another sample of its prompt has a",
    ):
        estimate(samples([1, 2], [{"a": 1.0}, {}]), name="gdpo")


def test_reward_beyond_the_range_of_float32_is_named() -> None:
    with pytest.raises(RewardError, match=r"sample s1: reward must be within \+-3.4e38, got nan"):
        estimate(samples([1, float("nan"), 2]))
    with pytest.raises(RewardError, match=r"sample s0: b must be within \+-3.4e38, got inf"):
        estimate(samples([1, 2], [{"a": 1.0, "b": float("inf")}, {"a": 1.0, "b": 2.0}]))


@pytest.mark.parametrize("name", [spec.name for spec in installed_algorithms()])
def test_huge_reward_is_an_error_of_its_prompt_group_under_every_algorithm(name: str) -> None:
    rewards = [1.0, 1e308, -1e308]
    with pytest.raises(RewardError, match=r"sample s1: reward must be within .*, got 1e\+308"):
        estimate(samples(rewards, with_logprobs=True), name=name)


def test_advantages_that_float32_cannot_hold_are_an_error_of_their_prompt_group() -> None:
    with pytest.raises(
        RewardError,
        match=r"algorithm rloo: the advantages of sample s0 must be finite, got inf from the rewards \[3.4e\+38, -3.4e\+38\]",
    ):
        estimate(samples([3.4e38, -3.4e38]), name="rloo")


def test_overlong_penalty_grows_linearly_over_the_last_part_of_the_length() -> None:
    lengths = np.array([0, 16_384, 18_432, 20_480, 21_000], np.float64)
    assert overlong_penalties(
        lengths, max_new_tokens=20_480, ratio=0.2, penalty=1.0
    ).tolist() == pytest.approx([0, 0, 0.5, 1, 1])
    assert (
        overlong_penalties(lengths, max_new_tokens=20_480, ratio=0.0, penalty=1.0).tolist()
        == [0] * 5
    )


def test_advantages_are_placed_only_on_loss_tokens() -> None:
    assert estimate(samples([1, 2, 6]), normalise_std=False) == [
        [0, -2, -2, 0, -2],
        [0, 0, -1],
        [0, 3, 3],
    ]


def test_overlong_completions_lose_reward_before_it_is_normalised() -> None:
    # Of at most 4 tokens, the penalty runs from 2 to 4; the samples have 3, 1 and 2 loss tokens.
    estimated = estimate(
        samples([1, 1, 1]),
        max_new_tokens=4,
        normalise_std=False,
        overlong_ratio=0.5,
        overlong_penalty=3.0,
    )
    assert [max(row, key=abs) for row in estimated] == pytest.approx([-1.0, 0.5, 0.5])


def test_kl_in_the_reward_of_a_sample_is_the_sum_over_its_tokens() -> None:
    # policy - reference at the loss tokens: 0.5, -1, 2 | -1 | 0.5, -1, so k1 sums to 1.5, -1, -0.5.
    estimated = estimate(samples([1, 1, 1], with_logprobs=True), name="rloo", kl_coefficient=2.0)
    rewards = np.array([1 - 3.0, 1 + 2.0, 1 + 1.0])
    expected = [rewards[0] - 2.5, rewards[1] - 0.0, rewards[2] - 0.5]
    assert [max(row, key=abs) for row in estimated] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("estimator", "bound", "terms"),
    [
        ("k1", 0.0, [0.5, -1.0, 2.0]),
        ("k2", 0.0, [0.125, 0.5, 2.0]),
        ("k3", 0.0, [np.exp(-0.5) - 0.5, np.e - 2, np.exp(-2) + 1]),
        ("abs", 0.0, [0.5, 1.0, 2.0]),
        ("low_variance", 0.0, [np.exp(-0.5) - 0.5, np.e - 2, np.exp(-2) + 1]),
        ("k1", 0.75, [0.5, -0.75, 0.75]),
        ("low_variance", 1.0, [np.exp(-0.5) - 0.5, np.e - 2, 1.0]),
    ],
)
def test_token_level_kl_is_credited_to_the_token_and_those_before_it(
    estimator: str, bound: float, terms: list[float]
) -> None:
    estimated = estimate(
        samples([1, 1, 1], with_logprobs=True),
        name="reinforce_plus_plus",
        kl_coefficient=0.1,
        kl_estimator=estimator,
        kl_bound=bound,
    )
    first, second, third = terms
    assert estimated[0] == pytest.approx(
        [0, 1 - 0.1 * (first + second + third), 1 - 0.1 * (second + third), 0, 1 - 0.1 * third]
    )
    with pytest.raises(
        RewardError, match="sample s0 lacks the log-probabilities for the KL in its reward"
    ):
        estimate(samples([1, 1, 1]), name="reinforce_plus_plus", kl_coefficient=0.1)


def test_teacher_log_ratio_adjusts_the_advantage_of_each_token() -> None:
    # policy - teacher at the loss tokens: 0.5, -1, 2 | -1 | 0.5, -1, on top of the centred rewards
    # -2, -1, 3, or of nothing.
    given = samples([1, 2, 6], with_logprobs=True)
    next_to_rewards = estimate(
        given, normalise_std=False, distill_coefficient=0.5, distill_placement="advantage"
    )
    assert next_to_rewards == [[0, -2.25, -1.5, 0, -3.0], [0, 0, -0.5], [0, 2.75, 3.5]]
    assert estimate(given, name="opd") == [[0, -0.5, 1.0, 0, -2.0], [0, 0, 1.0], [0, -0.5, 1.0]]
    with pytest.raises(
        RewardError,
        match="sample s0 lacks the teacher's or the policy's log-probabilities; is the role",
    ):
        estimate(samples([1, 2, 6]), name="opd")


def test_divergence_in_the_loss_does_not_change_advantages() -> None:
    given = samples([1, 2, 6], with_logprobs=True)
    assert estimate(given, distill_coefficient=0.5) == estimate(given)


def test_kl_in_the_loss_does_not_change_advantages() -> None:
    given = samples([1, 2, 6], with_logprobs=True)
    assert estimate(given, kl_coefficient=0.5) == estimate(given)


@pytest.mark.parametrize(
    ("result", "error", "text"),
    [
        (
            "rewards.total[:1]",
            ConfigError,
            r"its advantage must return 3 numbers, one for each sample, got \[1.0\]",
        ),
        (
            "rewards.total * float('nan')",
            RewardError,
            "the advantages of sample s0 must be finite, got nan from the rewards",
        ),
    ],
)
def test_custom_advantage_function_must_return_a_number_for_every_sample(
    result: str, error: type[Exception], text: str, tmp_path: Path
) -> None:
    file = tmp_path / "odd.py"
    file.write_text(f"""
from relax_events.config.algorithm_spec import AlgorithmSpec

def odd(rewards):
    return {result}

ODD = AlgorithmSpec(name="odd", summary="", formula="", source="", advantage=odd, policy_loss=lambda tokens: tokens.logprobs)
""")
    with pytest.raises(error, match=rf"algorithm .*odd.py:ODD: {text}"):
        estimate(samples([1, 2, 6]), name=f"{file}:ODD")
