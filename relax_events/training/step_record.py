"""What a rank contributes to a train step, and the record that the step leaves on the log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson

from relax_events.events.parts import Outcome, TopicOffset
from relax_events.events.types import PromptGroupEnded
from relax_events.training.batch.assembly import LocatedSample


@dataclass(slots=True)
class RankStepResult:
    """What one rank trained in one step, in trained order."""

    rank: int
    sample_ids: list[str] = field(default_factory=list)
    prompt_group_ids: list[str] = field(default_factory=list)
    partitions: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    micro_batches: list[int] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    completion_lengths: list[int] = field(default_factory=list)
    num_micro_batches: int = 0
    ended: list[PromptGroupEnded] = field(default_factory=list)
    consumed: list[TopicOffset] = field(default_factory=list)
    trace_headers: list[dict[str, str]] = field(default_factory=list)
    """The context of each prompt group's trace; empty of those that are not traced."""

    def add_micro_batch(self, micro_batch: Sequence[LocatedSample], *, trainer_version: int) -> None:
        """Add a trained micro-batch."""
        for placed in micro_batch:
            sample = placed.sample
            self.sample_ids.append(sample.sample_id)
            self.partitions.append(placed.partition)
            self.offsets.append(placed.offset)
            self.micro_batches.append(self.num_micro_batches)
            self.staleness.append(trainer_version - sample.key.min_policy_version)
            self.rewards.append(sample.reward)
            self.completion_lengths.append(len(sample.tokens) - sample.num_prompt_tokens)
        self.num_micro_batches += 1

    def pop_micro_batches(self) -> list[list[str]]:
        """Return the sample ids of each trained micro-batch, and forget that they were trained."""
        trained: list[list[str]] = [[] for _ in range(self.num_micro_batches)]
        for sample_id, index in zip(self.sample_ids, self.micro_batches, strict=True):
            trained[index].append(sample_id)
        for column in (
            self.sample_ids,
            self.partitions,
            self.offsets,
            self.micro_batches,
            self.staleness,
            self.rewards,
            self.completion_lengths,
        ):
            column.clear()
        self.num_micro_batches = 0
        return trained

    def to_bytes(self) -> bytes:
        """Serialise for the other ranks."""
        return orjson.dumps(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> RankStepResult:
        """Read what `to_bytes` wrote."""
        fields: dict[str, Any] = orjson.loads(data)
        ended = [
            PromptGroupEnded(**{**item, "outcome": Outcome(item["outcome"])})
            for item in fields.pop("ended")
        ]
        consumed = [TopicOffset(**item) for item in fields.pop("consumed")]
        return cls(ended=ended, consumed=consumed, **fields)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """All ranks' shares side by side, as TrainStepCommitted holds them."""

    prompt_group_ids: list[str]
    sample_ids: list[str]
    partitions: np.ndarray
    offsets: np.ndarray
    ranks: np.ndarray
    micro_batches: np.ndarray
    consumed: list[TopicOffset]
    staleness_counts: list[int]
    metrics: dict[str, float]

    @classmethod
    def merge(cls, shares: Sequence[RankStepResult], *, has_rewards: bool = True) -> StepRecord:
        """Put shares together, in rank order; samples that nobody rewarded give no metrics of
        rewards.
        """
        rewards = np.array([reward for share in shares for reward in share.rewards], np.float64)
        lengths = [length for share in shares for length in share.completion_lengths]
        staleness = np.array([value for share in shares for value in share.staleness], np.int64)
        return cls(
            prompt_group_ids=[group_id for share in shares for group_id in share.prompt_group_ids],
            sample_ids=[sample_id for share in shares for sample_id in share.sample_ids],
            partitions=np.array(
                [partition for share in shares for partition in share.partitions], np.int32
            ),
            offsets=np.array([offset for share in shares for offset in share.offsets], np.int64),
            ranks=np.array([share.rank for share in shares for _ in share.sample_ids], np.int32),
            micro_batches=np.array(
                [index for share in shares for index in share.micro_batches], np.int32
            ),
            consumed=[offset for share in shares for offset in share.consumed],
            staleness_counts=np.bincount(staleness).tolist(),
            metrics={
                **(
                    {"reward_mean": float(rewards.mean()), "reward_std": float(rewards.std())}
                    if has_rewards
                    else {}
                ),
                "staleness_mean": float(staleness.mean()),
                "completion_tokens_mean": float(np.mean(lengths)),
                "completion_tokens_max": float(max(lengths)),
            },
        )
