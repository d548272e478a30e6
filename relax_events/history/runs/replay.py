"""Prepares and verifies a replay.

Before it starts: finds its last step, and checks that all records that it will train are still on
the log. Afterwards: compares its metrics and weights with the parent's, step by step and bit for
bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from relax_events.config import ParentSection, RunConfig
from relax_events.errors import ConfigError
from relax_events.events.types import TrainStepCommitted
from relax_events.history.runs.details import find_missing_record
from relax_events.kafka.admin import Admin
from relax_events.kafka.connection import Connection
from relax_events.runtime.run_description import ParentRun
from relax_events.topics.names import TRAINING_SAMPLES

ROLLOUT_KEYS = ("max_staleness", "prompts_per_step", "samples_per_prompt")


def resolve_parent(config: RunConfig) -> RunConfig:
    """Return the configuration of a replay or fork, with the end and the parent's object store
    filled in; any other run's is unchanged.

    Raises:
        ConfigError: The parent does not exist, is itself a replay, has not advanced that far, its
            log names another store, or its records are purged; the text names the first missing
            record.
    """
    if not config.parent.run:
        return config
    source = ParentRun.read(
        Connection.from_config(config.broker, client_id=f"{config.run.id}.source"),
        config.parent.run,
        child_config=config,
    )
    if config.parent.from_version < source.config.first_version:
        begin = f"run {config.parent.run} begins with version {source.config.first_version}"
        raise ConfigError(
            f"{begin}, so parent.from_version must be at least that, got "
            f"{config.parent.from_version}"
        )
    config = _with_store(config, source)
    if not config.is_replay:
        return config
    _require_same_rollouts(config, source)
    newest = _require_records(config.parent, source)
    if config.parent.follow:
        return config
    until = config.parent.until_version if config.parent.until_version >= 0 else newest
    if not config.parent.from_version < until <= newest:
        raise ConfigError(
            f"run {config.parent.run} has come to version {newest}, so versions "
            f"{config.parent.from_version} to {until} can't be replayed; "
            "choose parent.from_version and parent.until_version within, or set "
            "parent.follow = true to wait for more"
        )
    return config.model_copy(
        update={"parent": config.parent.model_copy(update={"until_version": until})}
    )


def _with_store(config: RunConfig, source: ParentRun) -> RunConfig:
    """Fill in the parent's object store, once its log and the run file agree."""
    text, usual = (
        source.config.objects_uri,
        config.model_copy(
            update={"run": config.run.model_copy(update={"id": config.parent.run})}
        ).objects_uri,
    )
    if text != (stated := config.parent.objects_uri or usual):
        rule = (
            f"the log of run {config.parent.run} says that its objects lie in {text}, and the "
            f"run file that they lie in {stated}"
        )
        raise ConfigError(f"{rule}; set parent.objects_uri to where they are")
    return config.model_copy(
        update={"parent": config.parent.model_copy(update={"objects_uri": text})}
    )


def _require_same_rollouts(config: RunConfig, source: ParentRun) -> None:
    if source.config.is_replay:
        other = source.config.parent.run
        raise ConfigError(
            f"run {config.parent.run} is itself a replay, of {other}, and has no rollouts of "
            f"its own; replay {other}"
        )
    for key in ROLLOUT_KEYS:
        chosen, recorded = getattr(config.run, key), getattr(source.config.run, key)
        if chosen != recorded:
            raise ConfigError(
                f"run.{key} says how the rollouts were made: run {config.parent.run} has "
                f"{recorded}, got {chosen}; leave it as it is"
            )


def _require_records(parent: ParentSection, source: ParentRun) -> int:
    """Return the parent's newest version, once the records of all steps to train are available."""
    topic = source.plan.topic(TRAINING_SAMPLES)
    topic_partitions = [
        (topic, partition) for partition in range(source.plan.num_sample_partitions)
    ]
    admin = Admin(source.connection)
    oldest = {
        partition: offset
        for (_, partition), offset in admin.beginning_offsets(topic_partitions).items()
    }
    admin.close()
    newest, earliest, gone = source.config.first_version, 0, ""
    for step in source.steps():
        newest = step.policy_version
        if (
            _is_wanted(parent, step)
            and (topic_partition := find_missing_record(step, oldest)) is not None
        ):
            begin = f"the log begins at {oldest.get(topic_partition[0], 0)}"
            gone = gone or (
                f"record {topic}[{topic_partition[0]}]@{topic_partition[1]}, of train step "
                f"{step.train_step}, "
                f"was purged ({begin})"
            )
            earliest = step.policy_version
    if gone:
        start = f"run {parent.run} can't be replayed from version {parent.from_version}"
        raise ConfigError(f"{start}: {gone}; take a parent.from_version of {earliest} or later")
    return newest


def _is_wanted(parent: ParentSection, step: TrainStepCommitted) -> bool:
    """Return whether a replay trains the parent's step."""
    until = parent.until_version
    return parent.from_version <= step.train_step and (until < 0 or step.train_step < until)


def read_source_curves(config: RunConfig, train_steps: list[int]) -> dict[str, Any] | None:
    """Return the metrics of the parent's steps next to those of a run, None where it has none; None
    for a run without a parent.
    """
    if not config.parent.run:
        return None
    source = ParentRun.read(
        Connection.from_config(config.broker, client_id=f"{config.run.id}.source"),
        config.parent.run,
        child_config=config,
    )
    numbers = set(train_steps)
    metrics = {
        step.train_step: step.metrics for step in source.steps() if step.train_step in numbers
    }
    names = dict.fromkeys(name for step in metrics.values() for name in step)
    curves = {name: [metrics.get(number, {}).get(name) for number in train_steps] for name in names}
    return {
        "run_id": config.parent.run,
        "from_version": config.parent.from_version,
        "curves": curves,
    }


@dataclass(frozen=True, slots=True)
class Verification:
    """Number of compared steps, and the first difference as text; empty when there is none."""

    num_steps: int
    difference: str


def verify_replay(connection: Connection, source_id: str, replay_id: str) -> Verification:
    """Compare every step of a replay with the same step of its parent."""
    recorded = {step.train_step: step for step in ParentRun.read(connection, source_id).steps()}
    num_steps = 0
    for step in ParentRun.read(connection, replay_id).steps():
        if difference := first_difference(recorded[step.train_step], step):
            return Verification(num_steps, f"train step {step.train_step}: {difference}")
        num_steps += 1
    return Verification(num_steps, "" if num_steps else "no train step to compare")


def first_difference(recorded: TrainStepCommitted, replayed: TrainStepCommitted) -> str:
    """Return the difference between two commits of a step; times don't count, nor do metrics that a
    newer release added.
    """
    if recorded.sample_ids != replayed.sample_ids:
        return "other samples, or in another order"
    if _describe_update(recorded) != _describe_update(replayed):
        return f"its update was {_describe_update(recorded)}, is {_describe_update(replayed)}"
    for name in sorted(recorded.metrics):
        before, after = recorded.metrics.get(name), replayed.metrics.get(name)
        if before != after:
            return f"{name} was {before!r}, is {after!r}"
    if recorded.weights_digest != replayed.weights_digest:
        return (
            f"weights digest was {recorded.weights_digest.hex()}, is "
            f"{replayed.weights_digest.hex()} (a version whose manifest has format 1 or 2 has a "
            "SHA-256 there, which can't be compared with later ones)"
        )
    return ""


def _describe_update(step: TrainStepCommitted) -> str:
    return "skipped" if step.update_skipped else "held" if step.update_held else "made"
