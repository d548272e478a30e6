"""From a sample to what a reward function is asked, and from its answer to an event."""

from __future__ import annotations

import orjson

from relax_events.config import RewardConfig
from relax_events.errors import RewardError
from relax_events.events.types import SampleRolledOut, SampleScored
from relax_events.rewards.pool import RewardItem
from relax_events.rewards.scores import Score


def reward_item(sample: SampleRolledOut) -> RewardItem:
    """Return what a reward function is asked about a sample."""
    return RewardItem(
        sample_id=sample.sample_id,
        completion=sample.completion,
        answer=sample.answer,
        metadata=sample.metadata,
        prompt="\n".join(message.text for message in (*sample.messages, *sample.turns[:-1])),
        prompt_group_id=f"{sample.prompt_group_id}@{sample.policy_version}.{sample.generation_digest}",
    )


def source_of(sample: SampleRolledOut, reward: RewardConfig) -> str | None:
    """Return which of the section's functions scores a sample; one whose metadata can't be read goes to the first, which says so."""
    if not reward.routes:
        return None
    try:
        return reward.source_of(orjson.loads(sample.metadata))
    except (orjson.JSONDecodeError, AttributeError):
        return None


def as_scored(
    sample: SampleRolledOut, result: Score | RewardError, *, reward_name: str, reward_digest: str, judgement: str = ""
) -> SampleScored:
    """Return a sample's score; a failure is one with its text and without a reward, never a silent zero."""
    success = result if isinstance(result, Score) else None
    return SampleScored(
        sample_id=sample.sample_id,
        prompt_group_id=sample.prompt_group_id,
        policy_version=sample.policy_version,
        generation_digest=sample.generation_digest,
        reward=success.reward if success else None,
        components=success.components if success else {},
        reward_name=reward_name,
        reward_digest=reward_digest,
        error=None if success else str(result),
        judgement=judgement,
        seconds=success.seconds if success else 0.0,
    )
