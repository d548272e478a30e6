"""The result and phase times of one rank's part of a train step, and the step's record over all
ranks.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson

from relax_events.events.parts import FinishReason, Outcome, SampleOutcome, TopicOffset
from relax_events.events.types import PromptGroupEnded
from relax_events.training.batch.assembly import LocatedSample

MAX_COMPONENTS = 32
"""Components of rewards whose means are recorded with a step."""


class PhaseTimer:
    """Seconds by phase of one step. Time after the snapshot (the commit) is the next step's.

    The phases of a step add up to its time: `other` is the time outside of the measured phases,
    for example until the engines leave a shared device.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._snapshot: dict[str, float] = {}
        self._began = time.monotonic()

    def snapshot(self) -> dict[str, float]:
        """Return the seconds so far, for the step's record."""
        now = time.monotonic()
        other = now - self._began - sum(self.seconds.values())
        self._snapshot = {**self.seconds, "other": max(other, 0.0)}
        self._began = now
        return self._snapshot

    def next_step(self) -> PhaseTimer:
        """Return the next step's timer, with the time that this step spent after its snapshot."""
        following = PhaseTimer()
        if self._snapshot:
            following._began = self._began
        following.seconds |= {
            phase: rest
            for phase, seconds in self.seconds.items()
            if self._snapshot and (rest := seconds - self._snapshot.get(phase, 0.0)) > 0
        }
        return following

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """Add the time spent inside to a phase."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[phase] += time.monotonic() - started


@dataclass(slots=True)
class RankStepResult:
    """The samples that one rank trained in one step, in trained order.

    `rank` counts data-parallel ranks. `prompt_group_ids`, `ended` and `consumed` are of the
    partitions that the rank reads; the samples may be of others, where the ranks are balanced.
    `max_cells` is as TrainStepCommitted has it. `num_too_large` counts prompt groups that ended
    because a sample does not fit the device.
    """

    rank: int
    sample_ids: list[str] = field(default_factory=list)
    prompt_group_ids: list[str] = field(default_factory=list)
    partitions: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    micro_batches: list[int] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)
    rewards: list[float | None] = field(default_factory=list)
    finish_reasons: list[FinishReason] = field(default_factory=list)
    components: list[dict[str, float]] = field(default_factory=list)
    completion_lengths: list[int] = field(default_factory=list)
    num_micro_batches: int = 0
    max_cells: int = 0
    num_too_large: int = 0
    ended: list[PromptGroupEnded] = field(default_factory=list)
    consumed: list[TopicOffset] = field(default_factory=list)
    trace_headers: list[dict[str, str]] = field(default_factory=list)
    """Trace context of each prompt group; empty for those without a trace."""

    def add_micro_batch(
        self, micro_batch: Sequence[LocatedSample], *, trainer_version: int
    ) -> None:
        """Add a trained micro-batch, which may be empty."""
        for placed in micro_batch:
            sample = placed.sample
            self.sample_ids.append(sample.sample_id)
            self.partitions.append(placed.partition)
            self.offsets.append(placed.offset)
            self.micro_batches.append(self.num_micro_batches)
            self.staleness.append(trainer_version - sample.key.min_policy_version)
            self.rewards.append(sample.reward)
            self.finish_reasons.append(sample.finish_reason)
            self.components.append(sample.components)
            self.completion_lengths.append(len(sample.tokens) - sample.num_prompt_tokens)
        self.num_micro_batches += 1

    @property
    def outcomes(self) -> list[SampleOutcome]:
        """What became of each sample."""
        return list(map(SampleOutcome.of, self.finish_reasons, self.rewards))

    def pop_micro_batches(self) -> list[list[str]]:
        """Return the sample ids of each trained micro-batch, and clear the trained samples."""
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
            self.finish_reasons,
            self.components,
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
        reasons = [FinishReason(reason) for reason in fields.pop("finish_reasons")]
        return cls(ended=ended, consumed=consumed, finish_reasons=reasons, **fields)


def _describe_rewards(
    results: Sequence[RankStepResult], outcomes: Sequence[SampleOutcome]
) -> dict[str, float]:
    """Return mean and deviation of the samples that have a reward, the share of prompt groups that
    teach nothing, and the number of samples by outcome, as `samples_ended/OUTCOME`.
    """
    rewards = [reward for result in results for reward in result.rewards if reward is not None] or [
        0.0
    ]
    counts = Counter(outcomes)
    return {
        "reward_mean": float(np.mean(rewards)),
        "reward_std": float(np.std(rewards)),
        **compute_equal_ratio(results),
        **mean_components(one for result in results for one in result.components),
        **{f"samples_ended/{outcome}": float(counts[outcome]) for outcome in SampleOutcome},
    }


def compute_equal_ratio(results: Sequence[RankStepResult]) -> dict[str, float]:
    """Return `equal_reward_ratio`, the share of prompt groups whose rewards are all equal: their
    advantages are 0. Empty where no prompt group has two rewards.
    """
    rewards: dict[str, list[float]] = defaultdict(list)
    for result in results:
        for sample_id, reward in zip(result.sample_ids, result.rewards, strict=True):
            if reward is not None:
                rewards[sample_id.rpartition("/")[0]].append(reward)
    groups = [values for values in rewards.values() if len(values) > 1]
    num_equal = sum(min(values) == max(values) for values in groups)
    return {"equal_reward_ratio": num_equal / len(groups)} if groups else {}


def mean_components(samples: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each component of the rewards over the samples that have it, as
    `reward_mean/NAME`: of the first `MAX_COMPONENTS` names by the alphabet.
    """
    values: dict[str, list[float]] = defaultdict(list)
    for components in samples:
        for name, value in components.items():
            values[name].append(value)
    names = sorted(values)[:MAX_COMPONENTS]
    return {f"reward_mean/{name}": float(np.mean(values[name])) for name in names}


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The results of all ranks, concatenated as in TrainStepCommitted."""

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
    def merge(cls, results: Sequence[RankStepResult], *, has_rewards: bool = True) -> StepRecord:
        """Concatenate results in rank order; without rewards there are no reward metrics."""
        outcomes = [outcome for result in results for outcome in result.outcomes]
        lengths = [
            length
            for result in results
            for length, outcome in zip(result.completion_lengths, result.outcomes, strict=True)
            if outcome is not SampleOutcome.LOST
        ]
        staleness = np.array([value for result in results for value in result.staleness], np.int64)
        return cls(
            prompt_group_ids=[
                group_id for result in results for group_id in result.prompt_group_ids
            ],
            sample_ids=[sample_id for result in results for sample_id in result.sample_ids],
            partitions=np.array(
                [partition for result in results for partition in result.partitions], np.int32
            ),
            offsets=np.array([offset for result in results for offset in result.offsets], np.int64),
            ranks=np.array(
                [result.rank for result in results for _ in result.sample_ids], np.int32
            ),
            micro_batches=np.array(
                [index for result in results for index in result.micro_batches], np.int32
            ),
            consumed=[offset for result in results for offset in result.consumed],
            staleness_counts=np.bincount(staleness).tolist(),
            metrics={
                **(_describe_rewards(results, outcomes) if has_rewards else {}),
                "staleness_mean": float(staleness.mean()),
                "completion_tokens_mean": float(np.mean(lengths)),
                "completion_tokens_max": float(max(lengths)),
                "prompt_groups_too_large": float(sum(result.num_too_large for result in results)),
            },
        )
