"""Baselines and deviations of prompt groups and steps: numbers worked out by hand, and the papers'
formulas written out in float64."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest

from relax_events.algorithms.advantage_estimator import AdvantageEstimator, RewardedSample
from relax_events.algorithms.advantages import (
    GroupRewards,
    centred_advantages,
    gdpo_advantages,
    grpo_advantages,
    maxrl_advantages,
    opo_advantages,
)
from relax_events.config import AlgorithmConfig
from relax_events.errors import RewardError
from relax_events.training.batch.step_statistics import (
    Whitening,
    compute_reward_scaling,
    compute_whitening,
)
from relax_events.training.ranks import SingleRank

leave_one_out = partial(grpo_advantages, baseline="leave_one_out")


def group(rewards: list[float], lengths: list[float] | None = None) -> GroupRewards:
    return GroupRewards(
        np.array(rewards), lengths=None if lengths is None else np.array(lengths, np.float64)
    )


def estimate(
    rewards: list[float | None],
    masks: list[list[int]],
    *,
    cut_off: tuple[int, ...] = (),
    **settings: Any,
) -> list[list[float]]:
    samples = [
        RewardedSample(
            sample_id=str(index),
            reward=reward,
            loss_mask=np.array(mask, np.uint8),
            components={},
            is_truncated=index in cut_off,
        )
        for index, (reward, mask) in enumerate(zip(rewards, masks, strict=True))
    ]
    return [
        values.tolist()
        for values in AdvantageEstimator(
            AlgorithmConfig.model_validate(settings), max_new_tokens=8
        )(samples)
    ]


def test_leave_one_out_is_divided_by_the_groups_standard_deviation() -> None:
    # Others' means 2.5, 2, 1.5: -1.5, 0, 1.5; deviation of 1, 2, 3 with n - 1: 1.
    assert leave_one_out(group([1, 2, 3]), normalise_std=False).tolist() == pytest.approx(
        [-1.5, 0, 1.5]
    )
    assert leave_one_out(group([1, 2, 3]), normalise_std=True).tolist() == pytest.approx(
        [-1.5, 0, 1.5], rel=1e-5
    )
    # One success in four: 1 - 0, 0 - 1/3; deviation 1/2.
    assert leave_one_out(group([1, 0, 0, 0]), normalise_std=True).tolist() == pytest.approx(
        [2, -2 / 3, -2 / 3, -2 / 3], rel=1e-5
    )
    assert leave_one_out(group([0.1] * 7), normalise_std=True).tolist() == [0.0] * 7
    assert estimate([1, 0, 0, 0], [[0, 1]] * 4, name="rloo", normalise_std=True)[
        0
    ] == pytest.approx([0, 2], rel=1e-5)
    with pytest.raises(RewardError, match="needs at least 2 samples of a prompt, got 1"):
        leave_one_out(group([1]), normalise_std=True)


def test_deviation_is_divided_by_n_where_the_correction_is_0() -> None:
    # Of 1, 2, 3 around 2: sqrt(2 / 3) with n, 1 with n - 1. Of one success in four: sqrt(3) / 4 and
    # 1 / 2.
    assert estimate([1, 2, 3], [[1]] * 3, name="grpo", std_correction=0)[2] == pytest.approx(
        [math.sqrt(1.5)], rel=1e-5
    )
    assert estimate([1, 2, 3], [[1]] * 3, name="grpo", std_correction=1)[2] == pytest.approx(
        [1.0], rel=1e-5
    )
    assert estimate([1, 2, 3], [[1]] * 3, name="grpo") == estimate(
        [1, 2, 3], [[1]] * 3, name="grpo", std_correction=1
    )
    assert estimate([1, 0, 0, 0], [[1]] * 4, name="rloo", normalise_std=True, std_correction=0)[
        0
    ] == pytest.approx([4 / math.sqrt(3)], rel=1e-5)
    assert estimate([0.5], [[1]], name="grpo", std_correction=0) == [[0.0]]
    components = {"right": np.array([1.0, 0.0]), "form": np.array([3.0, 1.0])}
    apart = gdpo_advantages(
        GroupRewards(np.zeros(2), components),
        normalise_std=True,
        reward_weights={"right": 1.0, "form": 0.5},
        std_correction=0,
    )
    assert apart.tolist() == pytest.approx([1.5, -1.5], rel=1e-5)


def test_standard_deviation_over_a_step_divides_by_n_or_n_minus_1() -> None:
    advantages, lengths = np.array([1.0, 1.0, 1.0, 5.0], np.float32), np.array([3, 1])
    of_tokens = [
        compute_whitening(
            [(advantages, lengths)], over="tokens", correction=correction, ranks=SingleRank()
        ).std
        for correction in (0, 1)
    ]
    assert of_tokens == pytest.approx([math.sqrt(12 / 4), math.sqrt(12 / 3)])
    of_rewards = [
        compute_reward_scaling(
            [np.array([1.0, 2.0, 3.0])], correction=correction, ranks=SingleRank()
        ).std
        for correction in (0, 1)
    ]
    assert of_rewards == pytest.approx([math.sqrt(2 / 3), 1.0])
    alone = compute_whitening(
        [(advantages[:1], lengths[1:])], over="tokens", correction=1, ranks=SingleRank()
    )
    assert alone.apply(np.array([1.0])).tolist() == [0.0]


def test_leave_one_out_subtracts_the_mean_of_the_other_rewards() -> None:
    rewards = np.random.default_rng(3).normal(size=9)
    apart = [rewards[i] - math.fsum(np.delete(rewards, i)) / 8 for i in range(9)]
    deviation = math.sqrt(math.fsum((rewards - math.fsum(rewards) / 9) ** 2) / 8)
    np.testing.assert_allclose(
        leave_one_out(GroupRewards(rewards), normalise_std=False), apart, rtol=1e-12
    )
    np.testing.assert_allclose(
        leave_one_out(GroupRewards(rewards), normalise_std=True),
        np.array(apart) / (deviation + 1e-6),
        rtol=1e-12,
    )


def test_deviation_of_the_other_samples_worked_out_by_hand() -> None:
    # Of 1, 2, 6: others' means 4, 3.5, 1.5 and deviations sqrt(8), sqrt(12.5), sqrt(0.5), n - 1.
    both = leave_one_out(group([1, 2, 6]), normalise_std="leave_one_out")
    assert both.tolist() == pytest.approx(
        [-3 / math.sqrt(8), -1.5 / math.sqrt(12.5), 4.5 / math.sqrt(0.5)], rel=1e-5
    )
    by_n = grpo_advantages(group([1, 2, 6]), normalise_std="leave_one_out", std_correction=0)
    assert by_n.tolist() == pytest.approx([-2 / 2, -1 / 2.5, 3 / 0.5], rel=1e-5)
    # One success in four: the others of the success are equal, and it is not divided.
    lone = leave_one_out(group([1, 0, 0, 0]), normalise_std="leave_one_out").tolist()
    deviation = math.sqrt(1 / 3)
    assert lone == pytest.approx([1.0, *[-1 / 3 / deviation] * 3], rel=1e-5)
    # 0.35 seven times and 0 once: the deviation of equal others is 0 and no rounding noise.
    near = leave_one_out(group([0.35] * 7 + [0]), normalise_std="leave_one_out")
    assert near[7] == pytest.approx(-0.35, rel=1e-12)
    assert np.abs(near).max() < 1
    for correction in (0, 1):
        for rewards in ([0.1] * 7, [0.1, 0.1]):
            equal = leave_one_out(
                group(rewards), normalise_std="leave_one_out", std_correction=correction
            )
            assert equal.tolist() == [0.0] * len(rewards)
        pair = leave_one_out(
            group([1, 0]), normalise_std="leave_one_out", std_correction=correction
        )
        assert pair.tolist() == [1.0, -1.0]
    assert grpo_advantages(group([3.0]), normalise_std="leave_one_out").tolist() == [0.0]


def test_baseline_is_chosen_apart_from_the_loss() -> None:
    rewards, masks = [1.0, 2.0, 6.0], [[0, 1], [1, 1], [1]]
    others = [[0.0, -3.0], [-1.5, -1.5], [4.5]]
    for name in ("grpo", "gspo", "cispo"):
        settings = {"name": name, "normalise_std": False}
        assert estimate(rewards, masks, baseline="leave_one_out", **settings) == others
        assert estimate(rewards, masks, baseline="none", **settings) == [
            [0.0, 1.0],
            [2.0, 2.0],
            [6.0],
        ]
    assert estimate(rewards, masks, name="rloo") == others
    assert estimate(rewards, masks, name="rloo", baseline="group") == estimate(
        rewards, masks, name="grpo", normalise_std=False
    )
    assert estimate([2.0], [[1, 1]], baseline="none", normalise_std=False) == [[2.0, 2.0]]
    with pytest.raises(RewardError, match="needs at least 2 samples of a prompt, got 1"):
        estimate([2.0], [[1]], baseline="leave_one_out")


@pytest.mark.parametrize("over", ["mean", "samples", "tokens"])
@pytest.mark.parametrize("correction", [0, 1])
def test_statistics_of_a_step_do_not_depend_on_how_it_is_split(over: Any, correction: int) -> None:
    generator = np.random.default_rng(7)
    lengths = generator.integers(0, 5, 40)
    lengths[0], lengths[-1] = 0, 0
    advantages = generator.normal(2, 3, 40).repeat(lengths).astype(np.float32)
    units = (
        advantages.astype(float)
        if over == "tokens"
        else advantages[(np.cumsum(lengths) - 1)[lengths > 0]].astype(float)
    )
    mean = math.fsum(units) / len(units)
    deviation = math.sqrt(math.fsum((units - mean) ** 2) / (len(units) - correction))
    expected = (units - mean) / (1 if over == "mean" else deviation)
    seen = set()
    for num_parts in (1, 3, 40):
        parts = [
            (np.array_split(advantages, np.cumsum(lengths)[:-1]), lengths, indices)
            for indices in np.array_split(np.arange(40), num_parts)
        ]
        whitening = compute_whitening(
            [
                (np.concatenate([rows[index] for index in indices]), all_lengths[indices])
                for rows, all_lengths, indices in parts
            ],
            over=over,
            correction=correction,
            ranks=SingleRank(),
        )
        seen.add(whitening)
        white = whitening.apply(units)
        np.testing.assert_allclose(white, expected, rtol=1e-7, atol=1e-9)
        assert white.mean() == pytest.approx(0, abs=1e-9)
    assert len(seen) == 1, "to the last bit"
    for equal in ([0.1] * 7, [0.5], []):
        values = np.array(equal, np.float32)
        white = compute_whitening(
            [(values, np.ones(len(values), np.int64))],
            over=over,
            correction=correction,
            ranks=SingleRank(),
        ).apply(values.astype(float))
        assert white.tolist() == [0.0] * len(values)


def test_length_weighted_baseline_worked_out_by_hand() -> None:
    # (3 * 1 + 1 * 0) / 4 = 0.75
    assert opo_advantages(group([1, 0], [3, 1])).tolist() == [0.25, -0.75]
    assert opo_advantages(group([1, 0, 4], [1, 0, 3])).tolist() == pytest.approx(
        [1 - 13 / 4, -13 / 4, 4 - 13 / 4]
    )
    assert estimate([1, 0], [[0, 1, 1, 1], [1, 0]], name="opo") == [
        [0, 0.25, 0.25, 0.25],
        [-0.75, 0],
    ]


def test_length_weighted_baseline_is_the_mean_reward_per_token() -> None:
    generator = np.random.default_rng(4)
    rewards, lengths = (
        generator.normal(size=8),
        generator.integers(1, 20_000, size=8).astype(np.float64),
    )
    tokens = np.repeat(
        rewards, lengths.astype(int)
    )  # each reward as often as the sample has tokens
    np.testing.assert_allclose(
        opo_advantages(GroupRewards(rewards, lengths=lengths)),
        rewards - tokens.mean(),
        rtol=1e-9,
    )
    same = GroupRewards(rewards, lengths=np.full(8, 7.0))
    np.testing.assert_allclose(
        opo_advantages(same), centred_advantages(same), rtol=1e-12, atol=1e-12
    )


def test_length_weighted_baseline_of_equal_rewards_lone_or_empty_samples_is_exact() -> None:
    assert opo_advantages(group([0.1] * 3, [3, 5, 7])).tolist() == [0, 0, 0]
    assert opo_advantages(group([2.0], [5])).tolist() == [0]
    assert opo_advantages(group([1.0, 2.0], [0, 0])).tolist() == [0, 0]
    with pytest.raises(
        RewardError, match="needs the number of loss tokens of each sample, got none"
    ):
        opo_advantages(group([1.0, 2.0]))


def test_maxrl_advantages_match_hand_computed_values() -> None:
    # One of four right: (1 - 1/4) / (1/4) = 3 and -1; three of four: 1/3 and -1.
    assert maxrl_advantages(group([1, 0, 0, 0])).tolist() == [3, -1, -1, -1]
    assert maxrl_advantages(group([1, 1, 1, 0])).tolist() == pytest.approx(
        [1 / 3, 1 / 3, 1 / 3, -1]
    )
    assert (
        maxrl_advantages(group([0, 0])).tolist()
        == maxrl_advantages(group([0.1, 0.1])).tolist()
        == [0, 0]
    )
    assert maxrl_advantages(group([5])).tolist() == [0]
    assert estimate([1, 0, 0, 0], [[0, 1]] * 4, name="maxrl")[0] == [0, 3]
    with pytest.raises(
        RewardError, match="rewards must be at least 0, got -1; shift the rewards to 0 and above"
    ):
        maxrl_advantages(group([1, -1]))


def test_maxrl_advantages_estimate_the_truncated_maximum_likelihood_gradient() -> None:
    """With n samples the mean estimate is the gradient of -sum over k <= n - 1 of (1 - p)^k / k,
    which is p' times (1 - (1 - p)^(n - 1)) / p.

    The policy is a coin that is right with probability p = 1 / (1 + exp(-theta)): its score is 1 -
    p where right and -p where wrong, and p' = p (1 - p). All 2^n outcomes are summed by their
    probability.
    """
    p, n = 0.3, 5
    expected = p * (1 - p) * (1 - (1 - p) ** (n - 1)) / p
    found = 0.0
    for outcome in range(2**n):
        right = np.array([outcome >> i & 1 for i in range(n)], np.float64)
        probability = p ** right.sum() * (1 - p) ** (n - right.sum())
        found += (
            probability
            * float(maxrl_advantages(GroupRewards(right)) @ np.where(right == 1, 1 - p, -p))
            / n
        )
    assert found == pytest.approx(expected, rel=1e-12)


def test_standard_deviation_over_the_step_scales_without_centring() -> None:
    # Rewards 1, 2, 3 over two micro-batches: deviation with n - 1 is 1; with 6, 0: mean 2.4,
    # squares 1.96 + 0.16 + 0.36 + 12.96 + 5.76 = 21.2.
    scaling = compute_reward_scaling([np.array([3.0, 1.0]), np.array([2.0])], ranks=SingleRank())
    assert (scaling.mean, scaling.std) == (0.0, 1.0)
    scaling = compute_reward_scaling(
        [np.array([3.0, 1.0, 6.0]), np.array([2.0, 0.0])], ranks=SingleRank()
    )
    assert scaling.std == pytest.approx(math.sqrt(21.2 / 4))
    assert scaling.apply(np.array([0.5, 4.0])).tolist() == pytest.approx(
        [0.5 / math.sqrt(5.3), 4 / math.sqrt(5.3)]
    )


@pytest.mark.parametrize("rewards", [[], [5.0], [0.1] * 7])
def test_step_of_equal_rewards_leaves_advantages_unscaled(
    rewards: list[float],
) -> None:
    scaling = compute_reward_scaling([np.array(rewards)], ranks=SingleRank())
    assert scaling.apply(np.array([0.25, -3.0])).tolist() == [0.25, -3.0]
    assert scaling != Whitening(0.0, 0.0)


MASKS = [[0, 1], [1, 1], [1], [1]]


@pytest.mark.parametrize(
    ("truncated", "expected"),
    [("train", [[0, 2], [-1, -1], [0], [-1]]), ("mask", [[0, 2], [-1, -1], [0], [-1]])],
)
def test_truncated_samples_count_in_the_group_statistics(
    truncated: str, expected: list[list[float]]
) -> None:
    # Mean of 4, 1, 2, 1 is 2. Whether they have a loss is the trainer's concern.
    assert (
        estimate([4, 1, 2, 1], MASKS, cut_off=(0,), name="dr_grpo", truncated_samples=truncated)
        == expected
    )


def test_truncated_samples_are_excluded_from_the_group_statistics() -> None:
    settings = {"truncated_samples": "drop"}
    assert estimate([4, 1, 3, 2], MASKS, cut_off=(0,), name="dr_grpo", **settings) == [
        [0, 0],
        [-1, -1],
        [1],
        [0],
    ]
    assert estimate([4, 1, 3, 2], MASKS, cut_off=(1, 0), name="rloo", **settings) == [
        [0, 0],
        [0, 0],
        [1],
        [-1],
    ]
    assert estimate([4, 1, 3, 2], MASKS, cut_off=(1, 0, 3), name="rloo", **settings) == [
        [0, 0],
        [0, 0],
        [0],
        [0],
    ]  # no other to compare with
    assert estimate([4, 1, 3, 2], MASKS, cut_off=(0, 1, 2, 3), name="dr_grpo", **settings) == [
        [0, 0],
        [0, 0],
        [0],
        [0],
    ]
    assert estimate([4, 1, 3, 2], MASKS, name="dr_grpo", **settings) == estimate(
        [4, 1, 3, 2], MASKS, name="dr_grpo"
    )


UNLIKE = [0.35] * 7 + [0.0]


@pytest.mark.parametrize(
    ("settings", "of_equal", "of_other"),
    [
        # The mean is 0.30625, and the deviation 0.35 / sqrt(8) with n - 1.
        ({"name": "grpo"}, 0.125 * math.sqrt(8), -0.875 * math.sqrt(8)),
        ({"name": "dr_grpo"}, 0.04375, -0.30625),
        # The others' means are 2.1 / 7 = 0.3 and 0.35.
        ({"name": "rloo"}, 0.05, -0.35),
        ({"name": "rloo", "normalise_std": True}, math.sqrt(8) / 7, -math.sqrt(8)),
    ],
)
def test_one_reward_unlike_the_others_leaves_no_residue(
    settings: dict[str, Any], of_equal: float, of_other: float
) -> None:
    advantages = estimate(UNLIKE, [[1]] * 8, **settings)
    expected = [[of_equal]] * 7 + [[of_other]]
    np.testing.assert_allclose(advantages, expected, rtol=1e-5)


@pytest.mark.parametrize("reward", [0.1, 0.2, 0.3, 1 / 3, -0.7, 1e-9, 1e9 + 0.1])
@pytest.mark.parametrize("number", [2, 3, 7, 8, 16])
@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "maxrl"])
def test_equal_rewards_give_advantages_of_exactly_zero(
    name: str, number: int, reward: float
) -> None:
    if name == "maxrl" and reward < 0:
        return
    assert estimate([reward] * number, [[1]] * number, name=name) == [[0.0]] * number


@pytest.mark.parametrize("normalises", [False, True, "leave_one_out"])
def test_rewards_that_differ_by_rounding_give_no_noise(normalises: Any) -> None:
    rewards = group([0.1 + 0.2, 0.3, 0.3, 0.3])
    assert rewards.total[0] != rewards.total[1]
    for function in (leave_one_out, grpo_advantages):
        advantages = function(rewards, normalise_std=normalises)
        assert np.abs(advantages).max() < 1e-6


@pytest.mark.parametrize("baseline", ["group", "leave_one_out"])
@pytest.mark.parametrize("truncated", ["train", "drop"])
def test_sample_without_a_reward_has_no_part_in_its_prompt_group(
    baseline: str, truncated: str
) -> None:
    settings: dict[str, Any] = {"baseline": baseline, "truncated_samples": truncated}
    mask = [0, 1, 1]
    others = estimate([1.0, 0.0, 0.5], [mask] * 3, **settings)
    whole = estimate([1.0, None, 0.0, 0.5, None], [mask] * 5, **settings)
    assert [whole[index] for index in (0, 2, 3)] == others
    assert [whole[index] for index in (1, 4)] == [[0.0] * 3] * 2
    assert estimate([None, None], [mask] * 2, **settings) == [[0.0] * 3] * 2


def test_late_sample_has_its_reward_for_each_component() -> None:
    def build(reward: float, parts: dict[str, float], *, is_late: bool = False) -> RewardedSample:
        return RewardedSample(
            sample_id="s",
            reward=reward,
            components=parts,
            loss_mask=np.array([0, 1], np.uint8),
            is_late=is_late,
        )

    finished = [build(3.0, {"a": 1.0, "b": 2.0}), build(0.0, {"a": 0.0, "b": 0.0})]
    estimator = AdvantageEstimator(AlgorithmConfig(name="gdpo"), max_new_tokens=8)
    expected = estimator([*finished, build(-2.0, {"a": -1.0, "b": -1.0})])
    late = estimator([*finished, build(-1.0, {}, is_late=True)])
    assert [values.tolist() for values in late] == [values.tolist() for values in expected]
