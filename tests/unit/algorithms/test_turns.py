"""Rewards by turn and by token: the tokens that they apply to, their use by each algorithm, and
rejected ones.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from event_samples import ready, rolled_out

from relax_events.algorithms.advantage_estimator import AdvantageEstimator, RewardedSample
from relax_events.algorithms.gae import (
    GroupValues,
    gae_advantages,
    rewards_by_loss_token,
)
from relax_events.algorithms.paths import turn_lengths
from relax_events.config import AlgorithmConfig
from relax_events.errors import RewardError
from relax_events.rewards.scores import Score, parse_score
from relax_events.rewards.scoring import build_reward_item, build_sample_scored
from relax_events.training.batch.assembly import LocatedSample
from relax_events.training.replay.relabel import AdvantageRelabeller, RelabelledReward

MASK = np.array([0, 1, 1, 0, 1, 0, 0, 1, 1, 1], np.uint8)
"""Turns of two tokens, one, and three."""


def sample(
    reward: float, mask: np.ndarray = MASK, *, turn_rewards: list[float] | None = None, **more: Any
) -> RewardedSample:
    by_turn = None if turn_rewards is None else np.array(turn_rewards)
    return RewardedSample(
        sample_id="a", reward=reward, loss_mask=mask, components={}, turn_rewards=by_turn, **more
    )


def estimate(one: RewardedSample, **settings: Any) -> list[float]:
    values: list[float] = AdvantageEstimator(
        AlgorithmConfig.model_validate(settings), max_new_tokens=16
    )([one])[0].tolist()
    return values


@pytest.mark.parametrize(
    ("mask", "lengths"),
    [
        (MASK, [2, 1, 3]),
        (np.zeros(3), []),
        (np.ones(3), [3]),
        (np.array([0, 1]), [1]),
        (np.array([1, 0, 1]), [1, 1]),
    ],
)
def test_turns_are_contiguous_runs_of_loss_tokens(mask: np.ndarray, lengths: list[int]) -> None:
    assert turn_lengths(mask).tolist() == lengths


def test_turn_rewards_go_to_the_last_token_and_token_rewards_to_their_own() -> None:
    by_token = np.array([0.0, 8.0, 0.0, 0.0, 16.0, 0.0])
    given = rewards_by_loss_token(
        MASK, turn_rewards=np.array([1.0, 2.0, 4.0]), token_rewards=by_token, sample_id="a"
    )
    assert given.tolist() == [0.0, 9.0, 2.0, 0.0, 16.0, 4.0]
    assert (
        rewards_by_loss_token(MASK, turn_rewards=None, token_rewards=None, sample_id="a").tolist()
        == [0.0] * 6
    )


def test_turn_and_token_rewards_of_wrong_length_or_not_finite_are_rejected() -> None:
    with pytest.raises(
        RewardError,
        match="sample a: turn_rewards must be one for each turn, and there are 3, got 2",
    ):
        estimate(sample(1.0, turn_rewards=[1.0, 2.0]))
    with pytest.raises(
        RewardError,
        match="sample a: token_rewards must be one for each loss token, and there are 6, got 10",
    ):
        estimate(sample(1.0, token_rewards=np.zeros(10)), name="reinforce_plus_plus")
    with pytest.raises(
        RewardError, match=r"sample a: turn_rewards must be within \+-3.4e38, got nan at 1"
    ):
        estimate(sample(1.0, turn_rewards=[1.0, float("nan"), 0.0]))
    with pytest.raises(
        RewardError,
        match="sample a: turn_rewards must be one for each turn, and there are 0, got 1",
    ):
        estimate(sample(1.0, np.zeros(3, np.uint8), turn_rewards=[1.0]))


@pytest.mark.parametrize(
    ("gamma", "expected"),
    # Rewards of the six loss tokens 0, 1, 2, 0, 0, 4 + 3: the last is the turn's and what was
    # earned at the end.
    [
        (1.0, [10.0, 10.0, 9.0, 7.0, 7.0, 7.0]),
        (0.5, [0.5 + 0.5 + 7 / 32, 1.0 + 1.0 + 7 / 16, 2.0 + 7 / 8, 7 / 4, 7 / 2, 7.0]),
    ],
)
def test_returns_add_each_turn_reward_at_the_last_token_of_its_turn(
    gamma: float, expected: list[float]
) -> None:
    given = estimate(
        sample(10.0, turn_rewards=[1.0, 2.0, 4.0]), name="reinforce_plus_plus", gamma=gamma
    )
    assert np.array(given)[MASK.astype(bool)].tolist() == pytest.approx(expected, rel=1e-7)


def test_gae_of_two_turns_matches_hand_computation() -> None:
    # Loss tokens: rewards 0, 1 (turn), 0.5 (token), 2 - 1 - 0.5 (end); values 0.5, 0.25, 0.5,
    # 0.125; gamma 0.5, lambda 0.5. d = (0.125 - 0.5, 1 + 0.25 - 0.25, 0.5 + 0.0625 - 0.5, 0.5 -
    # 0.125) = (-0.375, 1, 0.0625, 0.375) A3 = 0.375, A2 = 0.0625 + 0.375 / 4, A1 = 1 + A2 / 4, A0 =
    # -0.375 + A1 / 4
    mask = np.array([0, 1, 1, 0, 1, 1], np.uint8)
    values = np.array([9.0, 0.5, 0.25, 9.0, 0.5, 0.125])
    one = sample(
        2.0,
        mask,
        values=values,
        turn_rewards=[1.0, 0.0],
        token_rewards=np.array([0.0, 0.0, 0.5, 0.0]),
    )
    assert estimate(one, name="ppo", gamma=0.5, gae_lambda=0.5) == [
        0.0,
        -0.115234375,
        1.0390625,
        0.0,
        0.15625,
        0.375,
    ]


def test_turn_level_gae_of_two_turns_matches_hand_computation() -> None:
    # As above; with turn_gamma 0.5 the turns' last tokens have d = (1 + 0.5 * 0.125 - 0.25, 0.5 -
    # 0.125) = (0.8125, 0.375), so A1 = 0.8125 + 0.375 / 4 and A3 = 0.375; the others continue from
    # there: A0 = -0.375 + A1 / 4, A2 = 0.0625 + A3 / 4.
    mask = np.array([0, 1, 1, 0, 1, 1], np.uint8)
    values = np.array([9.0, 0.5, 0.25, 9.0, 0.5, 0.125])
    one = sample(
        2.0,
        mask,
        values=values,
        turn_rewards=[1.0, 0.0],
        token_rewards=np.array([0.0, 0.0, 0.5, 0.0]),
    )
    given = estimate(one, name="ppo", gamma=0.5, gae_lambda=0.5, turn_gamma=0.5)
    assert given == [0.0, -0.1484375, 0.90625, 0.0, 0.15625, 0.375]


def by_turn(
    rewards: list[float],
    values: list[float],
    turns: list[int],
    *,
    gammas: tuple[float, float],
    own: float,
    behind: float,
) -> list[float]:
    """Work out bi-level GAE token by token: from the last turn to the first, and in each from its
    last token to its first."""
    advantages, end, ahead, next_value = [0.0] * len(rewards), len(rewards), 0.0, behind
    for length in reversed(turns):
        last = end - 1
        ahead = rewards[last] + gammas[1] * next_value - values[last] + gammas[1] * own * ahead
        advantages[last], next_value = ahead, values[last]
        for position in reversed(range(end - length, last)):
            advantages[position] = (
                rewards[position]
                + gammas[0] * values[position + 1]
                - values[position]
                + gammas[0] * own * advantages[position + 1]
            )
        end -= length
    return advantages


def test_turn_level_gae_matches_the_recursion_and_ignores_other_samples() -> None:
    generator = np.random.default_rng(8)
    masks = [
        MASK,
        np.ones(4, np.uint8),
        np.array([0, 1, 0, 1, 0, 1], np.uint8),
        np.zeros(3, np.uint8),
    ]
    group = []
    for number, mask in enumerate(masks):
        lengths = turn_lengths(mask)
        by_end, by_position = (
            generator.normal(size=len(lengths)),
            generator.normal(size=int(lengths.sum())),
        )
        total = float(by_end.sum() + by_position.sum()) + (0.75 if len(lengths) else 0.0)
        values = generator.normal(size=len(mask)).astype(np.float32)
        parts = {
            "turn_rewards": by_end,
            "token_rewards": by_position,
            "values": values,
            "is_truncated": number % 2 == 0,
        }
        group.append(
            RewardedSample(
                sample_id=str(number), reward=total, loss_mask=mask, components={}, **parts
            )
        )
    settings = {
        "name": "ppo",
        "gamma": 0.9,
        "gae_lambda": 0.8,
        "turn_gamma": 0.7,
        "bootstrap_truncated": True,
    }
    estimator = AdvantageEstimator(AlgorithmConfig.model_validate(settings), max_new_tokens=16)
    for one, given in zip(group, estimator(group), strict=True):
        assert one.values is not None
        assert given.tolist() == estimator([one])[0].tolist()
        mask, lengths = one.loss_mask.astype(bool), turn_lengths(one.loss_mask)
        values = one.values[mask].astype(float).tolist()
        rewards = rewards_by_loss_token(
            one.loss_mask,
            turn_rewards=one.turn_rewards,
            token_rewards=one.token_rewards,
            sample_id="",
        )
        rewards[-1:] += 0.75
        behind = values[-1] if values and one.is_truncated else 0.0
        expected = by_turn(
            rewards.tolist(), values, lengths.tolist(), gammas=(0.9, 0.7), own=0.8, behind=behind
        )
        assert given[mask].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)
        assert not given[~mask].any()


def test_turn_level_gae_equals_token_level_gae_for_one_turn() -> None:
    one = sample(2.0, np.ones(5, np.uint8), values=np.linspace(-1, 1, 5))
    plain = estimate(one, name="ppo", gamma=0.9, gae_lambda=0.8)
    assert estimate(one, name="ppo", gamma=0.9, gae_lambda=0.8, turn_gamma=0.3) == pytest.approx(
        plain, rel=1e-6
    )


def test_turn_level_gae_requires_turn_lengths() -> None:
    group = GroupValues(np.zeros((1, 2)), np.zeros((1, 2)))
    with pytest.raises(
        RewardError, match="turn_gamma needs the number of loss tokens of each turn, got none"
    ):
        gae_advantages(group, gamma=1.0, gae_lambda=1.0, turn_gamma=1.0)


BRANCHED = {
    # two turns, of which the second path shares the first and then has one of its own
    "tokens": np.array([9, 1, 2, 8, 3, 9, 1, 2, 7, 4, 5], np.int32),
    "loss_mask": np.array([0, 1, 1, 0, 1, 0, 0, 0, 0, 1, 1], np.uint8),
    "path_lengths": (5, 6),
}


def test_turn_rewards_of_a_branched_episode_belong_to_the_turns_of_its_last_path() -> None:
    # The reward function saw turns 1 2 and 4 5: the first is trained in the first path, in which
    # nothing of the second counts. What is left, 2, was earned by both paths.
    one = RewardedSample(
        sample_id="a", reward=10.0, components={}, turn_rewards=np.array([3.0, 5.0]), **BRANCHED
    )
    estimator = AdvantageEstimator(AlgorithmConfig(name="reinforce_plus_plus"), max_new_tokens=8)
    assert estimator([one])[0].tolist() == [0, 5, 5, 0, 2, 0, 0, 0, 0, 7, 7]
    by_token = RewardedSample(
        sample_id="a", reward=2.0, components={}, token_rewards=np.eye(5)[1], **BRANCHED
    )
    assert estimator([by_token])[0].tolist() == [0, 2, 2, 0, 1, 0, 0, 0, 0, 1, 1]
    wrong = RewardedSample(
        sample_id="a", reward=10.0, components={}, turn_rewards=np.zeros(3), **BRANCHED
    )
    with pytest.raises(RewardError, match="one for each turn, and there are 2, got 3"):
        estimator([wrong])


def test_turn_rewards_of_a_side_path_are_not_asked_for() -> None:
    """A question on the side is a path of one turn; the function saw the two of the last path."""
    side = rolled_out(
        tokens=np.array([1, 2, 9, 3, 8, 4], np.int32),
        loss_mask=np.array([0, 1, 0, 1, 0, 1], np.uint8),
        rollout_logprobs=np.zeros(6, np.float32),
        path_lengths=[2, 4],
    )
    score = Score(3.0, {}, turn_rewards=(1.0, 2.0))
    scored = build_sample_scored(side, score, reward_name="mine", reward_digest="d")
    assert scored.error is None
    assert np.asarray(scored.turn_rewards).tolist() == [1.0, 2.0]
    recorded = ready(
        tokens=side.tokens,
        loss_mask=side.loss_mask,
        rollout_logprobs=np.zeros(6, np.float32),
        advantages=np.zeros(6, np.float32),
        reward=3.0,
        turn_rewards=np.array([1.0, 2.0]),
        path_lengths=[2, 4],
    )
    algorithm = AlgorithmConfig(name="reinforce_plus_plus")
    [own] = AdvantageRelabeller(algorithm, max_new_tokens=8)([LocatedSample(recorded, 0, 0)])
    assert own.sample.advantages.tolist() == [0, 0, 0, 3, 0, 2]


def test_critic_returns_use_turn_gamma_and_the_critics_own_lambda() -> None:
    """Returns are advantages by turn with the critic's own lambda, plus the recorded values."""
    algorithm = AlgorithmConfig.model_validate(
        {"name": "ppo", "turn_gamma": 0.5, "critic_gae_lambda": 1.0}
    )
    assert algorithm.of_critic is not None
    assert (algorithm.of_critic.turn_gamma, algorithm.of_critic.gae_lambda) == (0.5, 1.0)


def test_grpo_uses_only_the_total_of_turn_rewards() -> None:
    estimator = AdvantageEstimator(AlgorithmConfig(name="grpo"), max_new_tokens=16)
    by_turn = estimator(
        [sample(3.0, turn_rewards=[1.0, 1.0, 1.0]), sample(1.0, turn_rewards=[0.0, 0.0, 1.0])]
    )
    assert [values.tolist() for values in by_turn] == [
        values.tolist() for values in estimator([sample(3.0), sample(1.0)])
    ]


@pytest.mark.parametrize(
    ("value", "score"),
    [
        ({"turn_rewards": [1, 0.5]}, Score(1.5, {}, turn_rewards=(1.0, 0.5))),
        (
            {"reward": 2, "turn_rewards": [1.0], "token_rewards": (0.25, 0)},
            Score(3.25, {}, turn_rewards=(1.0,), token_rewards=(0.25, 0.0)),
        ),
        ({"form": 0.5, "turn_rewards": []}, Score(0.5, {"form": 0.5})),
    ],
)
def test_parse_score_adds_turn_and_token_rewards_to_the_total(
    value: dict[str, Any], score: Score
) -> None:
    assert parse_score(value) == score


def test_component_weights_do_not_scale_turn_rewards() -> None:
    assert parse_score({"form": 1.0, "turn_rewards": [3.0]}, weights={"form": 0.5}) == Score(
        3.5, {"form": 1.0}, turn_rewards=(3.0,)
    )


def test_parse_score_rejects_invalid_reward_lists_by_name() -> None:
    with pytest.raises(
        TypeError, match=r"returned 'turn_rewards': 1 \(int\); it must be a list of numbers"
    ):
        parse_score({"turn_rewards": 1})
    with pytest.raises(
        TypeError, match=r"returned 'token_rewards': \['1'\] \(list\); it must be a list of numbers"
    ):
        parse_score({"reward": 1, "token_rewards": ["1"]})
    with pytest.raises(
        ValueError, match=r"returned inf at 1 of 'turn_rewards'; rewards must be within \+-3.4e38"
    ):
        parse_score({"turn_rewards": [0, float("inf")]})
    with pytest.raises(
        ValueError, match=r"returned numbers that add up to 6e\+38; rewards must be within"
    ):
        parse_score({"turn_rewards": [3e38, 3e38]})


def test_score_with_wrong_number_of_turn_rewards_is_a_failure() -> None:
    one = rolled_out()
    failed = build_sample_scored(
        one, Score(2.0, {}, turn_rewards=(1.0, 1.0)), reward_name="mine", reward_digest="d"
    )
    wanted = (
        f"reward function mine returned rewards of a wrong length: sample {one.sample_id}: "
        "turn_rewards "
        "must be one for each turn, and there is 1, got 2"
    )
    assert (failed.reward, failed.turn_rewards, failed.error) == (None, None, wanted)
    scored = build_sample_scored(
        one,
        Score(1.5, {}, turn_rewards=(1.0,), token_rewards=(0.0, 0.5)),
        reward_name="mine",
        reward_digest="d",
    )
    assert (scored.error, scored.reward) == (None, 1.5)
    assert (
        np.asarray(scored.turn_rewards).tolist(),
        np.asarray(scored.token_rewards).tolist(),
    ) == ([1.0], [0.0, 0.5])
    assert np.asarray(build_reward_item(one).token_ids).tolist() == [7, 8]


def test_relabelling_uses_recorded_turn_rewards_or_those_of_a_rescoring() -> None:
    mask, none = np.array([0, 1, 0, 1], np.uint8), np.zeros(4, np.float32)
    placed = LocatedSample(
        ready(
            loss_mask=mask,
            rollout_logprobs=none,
            advantages=none,
            reward=3.0,
            turn_rewards=np.array([1.0, 0.0]),
        ),
        0,
        0,
    )
    algorithm = AlgorithmConfig(name="reinforce_plus_plus")
    [own] = AdvantageRelabeller(algorithm, max_new_tokens=8)([placed])
    assert own.sample.advantages.tolist() == [0.0, 3.0, 0.0, 2.0]
    others = {(placed.sample.sample_id, 0, ""): RelabelledReward(5.0, np.array([4.0, 0.0]))}
    [other] = AdvantageRelabeller(algorithm, max_new_tokens=8, rewards=others, scores="strict")(
        [placed]
    )
    assert (other.sample.advantages.tolist(), np.asarray(other.sample.turn_rewards).tolist()) == (
        [0.0, 5.0, 0.0, 1.0],
        [4.0, 0.0],
    )
