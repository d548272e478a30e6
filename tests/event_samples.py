"""Events with plausible values, for tests that care about one or two of their fields."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from relax_events.events.parts import (
    ChatMessage,
    FinishReason,
    ObjectRef,
    Outcome,
    SampleEvent,
    SampleKey,
    TopicOffset,
    VersionSegment,
)
from relax_events.events.types import (
    PolicyVersionPublished,
    PromptGroupEnded,
    PromptGroupIssued,
    SampleEvaluated,
    SampleReady,
    SampleRolledOut,
    SampleScored,
    TrainStepCommitted,
)
from relax_events.staleness import IssuedGroup

KEY_FIELDS = {field.name for field in dataclasses.fields(SampleKey)}


def sample_key(
    group_id: str = "000000-0000-0",
    index: int = 0,
    *,
    version: int = 0,
    of: int = 2,
    generation: str = "",
) -> SampleKey:
    """Make a sample's identity."""
    group = IssuedGroup.parse(group_id)
    return SampleKey(
        sample_id=f"{group_id}/{index}",
        prompt_group_id=group_id,
        sample_index=index,
        samples_per_prompt=of,
        train_step=group.slot.train_step,
        group_index=group.slot.group_index,
        attempt=group.attempt,
        row=7,
        policy_version=version,
        min_policy_version=version,
        max_policy_version=version,
        generation_digest=generation,
    )


def changed(event: Any, **changes: Any) -> Any:
    """Copy an event with some fields changed, those of its key among them."""
    if isinstance(event, SampleEvent):
        identity = {name: value for name, value in changes.items() if name in KEY_FIELDS}
        changes = {name: value for name, value in changes.items() if name not in KEY_FIELDS}
        changes = {"key": dataclasses.replace(event.key, **identity)} | changes
    return dataclasses.replace(event, **changes)


def _trajectory() -> dict[str, Any]:
    """Return the fields that rolled-out and ready samples share: four tokens, two of them
    generated."""
    return {
        "tokens": np.array([5, 6, 7, 8], np.int32),
        "loss_mask": np.array([0, 0, 1, 1], np.uint8),
        "rollout_logprobs": np.array([0, 0, -0.5, -0.25], np.float32),
        "num_prompt_tokens": 2,
        "temperature": 1.0,
        "finish_reason": FinishReason.STOP,
    }


def issued(group_id: str = "000000-0000-0", *, row: int = 7, of: int = 2) -> PromptGroupIssued:
    """Make an issued prompt group."""
    group = IssuedGroup.parse(group_id)
    return PromptGroupIssued(
        prompt_group_id=group_id,
        train_step=group.slot.train_step,
        group_index=group.slot.group_index,
        attempt=group.attempt,
        row=row,
        required_policy_version=0,
        samples_per_prompt=of,
        messages=[ChatMessage.of_text("user", "say hi")],
        seed=1,
        issued_at=1,
        lost_worker="",
    )


def rolled_out(
    group_id: str = "000000-0000-0",
    index: int = 0,
    *,
    version: int = 0,
    of: int = 2,
    **changes: Any,
) -> SampleRolledOut:
    """Make a rolled-out sample."""
    fields: dict[str, Any] = {
        "version_segments": [VersionSegment(version, 2)],
        "completion": "hi",
        "messages": [ChatMessage.of_text("user", "say hi")],
        "rolled_out_at": 1_700_000_000_000_000,
    }
    key = sample_key(group_id, index, version=version, of=of)
    sample: SampleRolledOut = changed(SampleRolledOut(key=key, **_trajectory() | fields), **changes)
    return sample


def scored(
    group_id: str = "000000-0000-0",
    index: int = 0,
    *,
    version: int = 0,
    reward: float = 1.0,
    generation: str = "",
) -> SampleScored:
    """Make a sample's score."""
    return SampleScored(
        key=sample_key(group_id, index, version=version, generation=generation),
        reward=reward,
        reward_name="exact_match",
        scored_at=1,
    )


def evaluated(
    group_id: str = "000000-0000-0",
    index: int = 0,
    *,
    version: int = 0,
    model_role: str = "reference",
    generation: str = "",
) -> SampleEvaluated:
    """Make a sample's log-probabilities by another model."""
    return SampleEvaluated(
        key=sample_key(group_id, index, version=version, generation=generation),
        model_role=model_role,
        model_version=0,
        values=np.zeros(4, np.float32),
        computed_at=1,
    )


def ready(
    group_id: str = "000000-0000-0",
    index: int = 0,
    *,
    version: int = 0,
    of: int = 2,
    **changes: Any,
) -> SampleReady:
    """Make a sample as the trainer gets it."""
    fields: dict[str, Any] = {
        "version_segments": [VersionSegment(version, 2)],
        "advantages": np.array([0, 0, 1, 1], np.float32),
        "reward": 1.0,
        "ready_at": 1,
    }
    key = sample_key(group_id, index, version=version, of=of)
    sample: SampleReady = changed(SampleReady(key=key, **_trajectory() | fields), **changes)
    return sample


def ended(
    group_id: str = "000000-0000-0",
    outcome: Outcome = Outcome.FAILED,
    *,
    version: int = 0,
    reason: str = "because",
) -> PromptGroupEnded:
    """Make the end of a prompt group."""
    group = IssuedGroup.parse(group_id)
    return PromptGroupEnded(
        prompt_group_id=group_id,
        train_step=group.slot.train_step,
        group_index=group.slot.group_index,
        attempt=group.attempt,
        row=7,
        outcome=outcome,
        reason=reason,
        policy_version=version,
        trainer_version=version,
        ended_at=1,
    )


def published(
    version: int,
    *,
    start_offsets: list[TopicOffset] | None = None,
    takes_spares: bool = False,
) -> PolicyVersionPublished:
    """Make the announcement of a policy version."""
    artifact = ObjectRef(f"file:///objects/weights/{version:08d}/manifest.json", bytes(32), 10)
    return PolicyVersionPublished(
        policy_version=version,
        artifact=artifact,
        transports=["store"],
        start_offsets=start_offsets or [],
        takes_spares=takes_spares,
        published_at=1,
    )


def committed(train_step: int, **changes: Any) -> TrainStepCommitted:
    """Make the record of a train step that trained nothing."""
    fields: dict[str, Any] = {
        "train_step": train_step,
        "policy_version": train_step + 1,
        "prompt_group_ids": [],
        "sample_ids": [],
        "partitions": np.zeros(0, np.int32),
        "offsets": np.zeros(0, np.int64),
        "ranks": np.zeros(0, np.int32),
        "micro_batches": np.zeros(0, np.int32),
        "consumed": [],
        "staleness_counts": [],
        "metrics": {"reward_mean": 0.5},
        "phase_seconds": {},
        "weights_digest": bytes(32),
        "committed_at": 1,
    }
    return TrainStepCommitted(**fields | changes)
