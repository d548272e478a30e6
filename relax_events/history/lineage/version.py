"""The origin of a policy version: its train step, prompt groups, samples, rewards and data rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from relax_events.errors import ConfigError, ObjectError, WeightsError
from relax_events.events.generations import TrajectoryKey, get_trajectory_key
from relax_events.events.types import (
    PolicyVersionPublished,
    SampleReady,
    SampleScored,
    TrainStepCommitted,
)
from relax_events.history.lineage.reader import data_rows, find_step, read_advantage
from relax_events.history.run_log import DecodedRecord, RunLog
from relax_events.history.runs.details import open_existing_store
from relax_events.topics.names import REWARD_SCORES, TRAINING_SAMPLES
from relax_events.weights.manifest import WeightManifest


@dataclass(frozen=True, slots=True)
class TrainedSample:
    """A sample of a train step; `position` is its record on `advantage.samples`, `data_row` is None
    where the data is not available.
    """

    sample_id: str
    prompt_group_id: str
    policy_version: int
    row: int
    data_row: int | None
    reward: float | None
    advantage: float | None
    reward_name: str
    reward_digest: str
    position: str


@dataclass(frozen=True, slots=True)
class RewardUse:
    """A version of a reward function, with the number of samples it scored and their mean
    reward.
    """

    reward_name: str
    reward_digest: str
    num_samples: int
    mean_reward: float


@dataclass(frozen=True, slots=True)
class VersionLineage:
    """A policy version; the initial weights have no step. Times in microseconds since the epoch.
    `base_model` is the folder and `base_digest` the digest of the model that the version's adapters
    belong to; empty where it is a whole model, the digest also where its manifest is deleted.
    """

    policy_version: int
    published_at: int
    published_position: str
    artifact: str
    weights_digest: str = ""
    train_step: int | None = None
    committed_at: int | None = None
    step_position: str = ""
    staleness_counts: list[int] = field(default_factory=list)
    prompt_group_ids: list[str] = field(default_factory=list)
    rewards: list[RewardUse] = field(default_factory=list)
    samples: list[TrainedSample] = field(default_factory=list)
    base_model: str = ""
    base_digest: str = ""


def version_lineage(log: RunLog, policy_version: int) -> VersionLineage:
    """Read the origin of a version; its samples are read at their recorded positions, and nothing
    else of their topic.

    Raises:
        ConfigError: The version was never published.
        BrokerError: Its samples were purged.
    """
    published = log.versions.get(policy_version)
    if published is None:
        raise ConfigError(
            f"version {policy_version} was not published; run {log.config.run.id} has "
            f"versions 0 to {log.newest_version}"
        )
    origin = (
        policy_version,
        published.event.published_at,
        published.position,
        published.event.artifact.uri,
    )
    step = find_step(log, policy_version - 1)
    base_model, base_digest = _find_base_model(log, published.event)
    if step is None:
        return VersionLineage(*origin, base_model=base_model, base_digest=base_digest)
    samples = _trained_samples(log, step.event)
    return VersionLineage(
        *origin,
        weights_digest=step.event.weights_digest.hex(),
        train_step=step.event.train_step,
        committed_at=step.event.committed_at,
        step_position=step.position,
        staleness_counts=list(step.event.staleness_counts),
        prompt_group_ids=list(step.event.prompt_group_ids),
        rewards=reward_uses(samples),
        samples=samples,
        base_model=base_model,
        base_digest=base_digest,
    )


def _find_base_model(log: RunLog, published: PolicyVersionPublished) -> tuple[str, str]:
    """Return the base model's folder and digest of a version that has adapters alone."""
    if log.config.model.lora is None:
        return "", ""
    path = str(log.config.model.path)
    try:
        if (store := open_existing_store(log.config)) is None:
            return path, ""
        return path, WeightManifest.from_json(store.get(published.artifact)).base_digest.hex()
    except (ObjectError, WeightsError):
        return path, ""


def _trained_samples(log: RunLog, step: TrainStepCommitted) -> list[TrainedSample]:
    records = {
        item.event.sample_id: item
        for item in log.read_at(TRAINING_SAMPLES, step.positions, SampleReady)
    }
    trained = [records[sample_id] for sample_id in step.sample_ids if sample_id in records]
    scores, row = _read_scores(log, trained), data_rows(log.config)
    return [
        _trained(item, scores.get(get_trajectory_key(item.event)), row(item.event.key.row))
        for item in trained
    ]


def _read_scores(
    log: RunLog, samples: Sequence[DecodedRecord[SampleReady]]
) -> dict[TrajectoryKey, SampleScored]:
    """Return the scores of these samples; only those of their versions are read."""
    keys = {get_trajectory_key(record.event) for record in samples}
    versions = [version for _, version, _ in keys]
    scores: dict[TrajectoryKey, SampleScored] = {}
    if keys:
        for record in log.read(
            log.offset_ranges(REWARD_SCORES, range(min(versions), max(versions) + 1)),
            SampleScored,
        ):
            key = get_trajectory_key(record.event)
            if key in keys:
                scores.setdefault(key, record.event)
    return scores


def _trained(
    record: DecodedRecord[SampleReady], score: SampleScored | None, data_row: int | None
) -> TrainedSample:
    event = record.event
    return TrainedSample(
        sample_id=event.sample_id,
        prompt_group_id=event.prompt_group_id,
        policy_version=event.policy_version,
        row=event.key.row,
        data_row=data_row,
        reward=event.reward,
        advantage=read_advantage(event),
        reward_name=score.reward_name if score else "",
        reward_digest=score.reward_digest if score else "",
        position=record.position,
    )


def reward_uses(samples: Sequence[TrainedSample]) -> list[RewardUse]:
    """Return the versions of reward functions that scored these samples."""
    rewards: dict[tuple[str, str], list[float]] = {}
    for sample in samples:
        if sample.reward is not None:
            name = sample.reward_name, sample.reward_digest
            rewards.setdefault(name, []).append(sample.reward)
    return [
        RewardUse(*name, len(values), sum(values) / len(values))
        for name, values in sorted(rewards.items())
    ]
