"""Convert a sample to a reward request, and its result to an event."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from relax_events.algorithms.gae import rewards_by_loss_token
from relax_events.config import RewardConfig
from relax_events.errors import RewardError
from relax_events.events.json_text import parse_json
from relax_events.events.parts import ChatMessage, FinishReason, StoredArray
from relax_events.events.tensors import dense
from relax_events.events.types import SampleRolledOut, SampleScored
from relax_events.rewards.pool import RewardItem, RewardPool
from relax_events.rewards.scores import Score


def build_reward_item(sample: SampleRolledOut) -> RewardItem:
    """Build the reward request of a sample."""
    tokens, mask, rewards = sample.tokens, sample.loss_mask, sample.environment_rewards
    token_ids = (
        None
        if isinstance(tokens, StoredArray) or isinstance(mask, StoredArray)
        else tokens[mask.astype(bool)]
    )
    return RewardItem(
        sample_id=sample.sample_id,
        completion=sample.completion,
        answer=sample.answer,
        metadata=sample.metadata,
        prompt="\n".join(message.text for message in (*sample.messages, *sample.turns[:-1])),
        prompt_group_id=f"{sample.prompt_group_id}@{sample.policy_version}.{sample.key.generation_digest}",
        turns=role_text_pairs(sample.turns),
        token_ids=token_ids,
        environment_rewards=()
        if rewards is None
        else dense(rewards, what=f"sample {sample.sample_id}: environment_rewards").tolist(),
    )


def role_text_pairs(turns: Sequence[ChatMessage]) -> list[tuple[str, str]]:
    """Return role and text of messages, as reward functions get them."""
    return [(message.role, message.text) for message in turns]


def read_source(sample: SampleRolledOut, reward: RewardConfig) -> str | None:
    """Return the source whose function scores a sample; None selects the default function, also if
    the metadata are invalid.
    """
    if not reward.routes:
        return None
    try:
        return reward.find_source(parse_json(sample.metadata))
    except (ValueError, AttributeError):
        return None


def get_fixed_score(finish_reason: FinishReason, reward: RewardConfig) -> Score | None:
    """Return the score of a sample that no function scores: `reward.on_timeout` where the policy
    was late, None for a sample without a reward.
    """
    if finish_reason is FinishReason.LATE and reward.on_timeout != "none":
        return Score(reward.on_timeout, {})
    return None


def score_samples(
    samples: Sequence[SampleRolledOut],
    pool: RewardPool,
    reward: RewardConfig,
    *,
    on_answer: Callable[[], None] = lambda: None,
) -> list[SampleScored]:
    """Score samples; those that were lost or late get their fixed score.

    Args:
        samples: The samples; of a function of prompt groups, whole ones.
        pool: Has the function.
        reward: The run's reward section.
        on_answer: Called when results have arrived.
    """
    items = [build_reward_item(one) for one in samples if one.finish_reason.is_scored]
    results = iter(pool.score_batch(items, on_answer=on_answer))
    return [
        build_sample_scored(
            sample,
            next(results)
            if sample.finish_reason.is_scored
            else get_fixed_score(sample.finish_reason, reward),
            reward_name=pool.name,
            reward_digest=pool.digest,
        )
        for sample in samples
    ]


def build_sample_scored(
    sample: SampleRolledOut,
    result: Score | RewardError | None,
    *,
    reward_name: str,
    reward_digest: str,
    judge_response: str = "",
) -> SampleScored:
    """Build the score event of a sample; a failure has an error text and no reward, never a silent
    zero.

    A score with a wrong number of turn or token rewards is a failure, too. The result None is of a
    sample that no function scores and that has no reward: it has no error either.
    """
    fitting = _check_lengths(sample, result, reward_name) if isinstance(result, Score) else result
    success = fitting if isinstance(fitting, Score) else None
    turn_rewards, token_rewards = _arrays(success) if success else (None, None)
    return SampleScored(
        key=sample.key,
        reward=success.reward if success else None,
        components=success.components if success else {},
        turn_rewards=turn_rewards,
        token_rewards=token_rewards,
        reward_name=reward_name,
        reward_digest=reward_digest,
        error=str(fitting) if isinstance(fitting, RewardError) else None,
        judge_response=judge_response,
        seconds=success.seconds if success else 0.0,
    )


def _check_lengths(sample: SampleRolledOut, score: Score, reward_name: str) -> Score | RewardError:
    turn_rewards, token_rewards = _arrays(score)
    if turn_rewards is None and token_rewards is None:
        return score
    if isinstance(sample.loss_mask, StoredArray):
        return RewardError(
            f"reward function {reward_name}: the loss mask of sample {sample.sample_id}, whose "
            "turns or tokens it rewards, was not fetched; give the function a parameter `turns`, "
            "so that it is fetched"
        )
    try:
        rewards_by_loss_token(
            sample.loss_mask,
            turn_rewards=turn_rewards,
            token_rewards=token_rewards,
            sample_id=sample.sample_id,
            tokens=None if isinstance(sample.tokens, StoredArray) else sample.tokens,
            path_lengths=sample.path_lengths,
        )
    except RewardError as error:
        return RewardError(
            f"reward function {reward_name} returned rewards of a wrong length: {error}"
        )
    return score


def _arrays(score: Score) -> tuple[NDArray[np.float64] | None, NDArray[np.float64] | None]:
    by_turn, by_token = (
        None if rewards is None else np.array(rewards, np.float64)
        for rewards in (score.turn_rewards, score.token_rewards)
    )
    return by_turn, by_token
