"""The details of a run from its log: curves, outcomes, and the versions from which it can be
trained again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np

from relax_events.config import RunConfig
from relax_events.events.types import ChangeRequested, TrainStepCommitted
from relax_events.history.run_log import RunLog
from relax_events.history.runs.listing import RunSummary, decode_records, read_runs
from relax_events.kafka.admin import Admin
from relax_events.kafka.connection import Connection
from relax_events.kafka.log_reader import LogReader
from relax_events.objects import ObjectStore
from relax_events.projections.run_state import RunState
from relax_events.session.resume import settings_history
from relax_events.topics import TopicPlan
from relax_events.topics.names import AUDIT, GROUP_OUTCOMES, TRAIN_STEPS, TRAINING_SAMPLES

METRICS_SHOWN = (
    "reward_mean", "loss", "policy_loss", "kl_estimate", "entropy", "grad_norm", "clip_fraction",
    "staleness_mean", "completion_tokens_mean",
    "preference_accuracy", "reward_margin",
)  # fmt: skip


@dataclass(slots=True)
class RunDetails:
    """A run with all its steps and outcomes; `recorded_steps` are those whose records are on the
    log, `weights` and `checkpoints` the versions that the object store still holds.
    """

    summary: RunSummary
    state: RunState = field(default_factory=lambda: RunState(keeps_all=True))
    recorded_steps: set[int] = field(default_factory=set)
    weights: list[int] = field(default_factory=list)
    checkpoints: list[int] = field(default_factory=list)
    forks: list[str] = field(default_factory=list)

    @property
    def replayable_versions(self) -> tuple[int, int] | None:
        """The first and last version of a replay: the newest uninterrupted range of steps whose
        records are on the log.
        """
        steps = [step.train_step for step in self.state.steps]
        if not steps or steps[-1] not in self.recorded_steps:
            return None
        gone = [step for step in steps if step not in self.recorded_steps]
        return (gone[-1] + 1 if gone else steps[0]), steps[-1] + 1

    @property
    def start_versions(self) -> list[int]:
        """The versions that another run may start from: the first one is the model itself, the
        others are in the object store.
        """
        config = self.summary.config
        first = [config.first_version] if config and not config.parent.run else []
        return sorted({*first, *self.weights, *self.checkpoints})


def read_details(connection: Connection, summary: RunSummary) -> RunDetails:
    """Read a run's steps and outcomes, one by one, and list its object store."""
    details = RunDetails(
        summary,
        forks=list_forks(read_runs(connection, with_progress=False).values(), summary.run_id),
    )
    admin, reader = Admin(connection), LogReader(connection)
    try:
        names = [
            TopicPlan.build_topic_name(summary.run_id, entity)
            for entity in (TRAIN_STEPS, GROUP_OUTCOMES)
        ]
        topic_partitions = [(name, 0) for name in names if name in summary.topics]
        begins, ends = (
            admin.beginning_offsets(topic_partitions),
            admin.end_offsets(topic_partitions),
        )
        oldest = _oldest_samples(admin, summary)
        for _, event in decode_records(
            reader,
            {
                topic_partition: (begins[topic_partition], ends[topic_partition])
                for topic_partition in topic_partitions
            },
        ):
            details.state.apply(event)
            if isinstance(event, TrainStepCommitted) and find_missing_record(event, oldest) is None:
                details.recorded_steps.add(event.train_step)
    finally:
        reader.close()
        admin.close()
    store = open_existing_store(summary.config) if summary.config else None
    if store is not None:
        details.weights = list_versions(store, "weights/")
        details.checkpoints = list_versions(store, "checkpoints/")
    return details


def list_forks(runs: Iterable[RunSummary], run_id: str) -> list[str]:
    """Return the runs that forked or replay this one, as `other (replay from 0)`."""
    forks = []
    for run in runs:
        if run.description is not None and run.description.parent_run == run_id:
            kind = "replay" if (config := run.config) and config.is_replay else "fork"
            forks.append(f"{run.run_id} ({kind} from {run.description.parent_version})")
    return forks


def _oldest_samples(admin: Admin, summary: RunSummary) -> dict[int, int]:
    """Return the oldest available offset in each partition of the topic that the run was trained
    on.
    """
    described = summary.description
    config = summary.config
    run_id = (
        described.parent_run
        if described and described.parent_run and config and config.is_replay
        else summary.run_id
    )
    topic = TopicPlan.build_topic_name(run_id or summary.run_id, TRAINING_SAMPLES)
    if topic not in summary.topics and run_id == summary.run_id:
        return {}
    count = summary.topics.get(topic) or (
        TopicPlan.from_config(config).num_sample_partitions if config else 0
    )
    return {
        partition: offset
        for (_, partition), offset in admin.beginning_offsets(
            [(topic, number) for number in range(count)]
        ).items()
    }


def find_missing_record(
    step: TrainStepCommitted, oldest: Mapping[int, int]
) -> tuple[int, int] | None:
    """Return the partition and offset of a record that a step was trained on and that is purged;
    None when all are available.

    Args:
        step: As committed.
        oldest: The oldest available offset, by partition of advantage.samples.
    """
    partitions, offsets = np.asarray(step.partitions), np.asarray(step.offsets)
    for partition in np.unique(partitions).tolist():
        offset = int(offsets[partitions == partition].min())
        if partition not in oldest or offset < oldest[partition]:
            return partition, offset
    return None


def open_existing_store(config: RunConfig) -> ObjectStore | None:
    """Open a run's object store for reading; None where it is a missing folder of this machine."""
    parts = urlsplit(config.objects_uri)
    if parts.scheme == "memory" or (
        parts.scheme == "file" and not Path(unquote(parts.path)).is_dir()
    ):
        return None
    return ObjectStore.open(config.objects_uri, uri_aliases=config.objects.uri_aliases)


def read_changes(log: RunLog) -> list[ChangeRequested]:
    """Return who asked for changes of a run, in log order; none for a run of a release that
    recorded none.
    """
    if log.plan.topic(AUDIT) not in log.topics:
        return []
    return [record.event for record in log.read_control(AUDIT, ChangeRequested)]


def list_versions(store: ObjectStore, folder: str) -> list[int]:
    """Return the versions with a complete manifest in a folder of versions."""
    keys = (key.removeprefix(folder) for key in store.list(folder) if key.endswith(".json"))
    return sorted({int(key.partition("/")[0]) for key in keys})


def details_as_dict(details: RunDetails) -> dict[str, Any]:
    """Return the output of `relax runs show`."""
    summary, config = details.summary, details.summary.config
    described, ended = summary.description, summary.state.ended
    recorded = details.replayable_versions
    return {
        "run": {
            **summary.as_row(),
            "reason": ended.reason if ended else "",
            "alive": summary.live_workers,
            "forks": details.forks,
            "package_version": described.package_version if described else "",
            "config_digest": described.config_digest if described else "",
        },
        "config": highlights(config) if config else {},
        "changes": {
            f"from version {version}": [str(change) for change in changes]
            for version, changes in settings_history(
                summary.state.descriptions, run_id=summary.run_id
            )
        },
        "outcomes": dict(details.state.outcomes),
        "versions": {
            "newest": summary.policy_version,
            "recorded": list(recorded) if recorded else [],
            "starts": details.start_versions,
            "weights": details.weights,
            "checkpoints": details.checkpoints,
        },
        "steps": [
            {
                "train_step": step.train_step,
                **{name: step.metrics[name] for name in METRICS_SHOWN if name in step.metrics},
            }
            for step in details.state.steps
        ],
    }


def describe_adapters(config: RunConfig) -> dict[str, Any]:
    """Return what adapters a run trains; nothing where it trains the whole model."""
    if (lora := config.model.lora) is None:
        return {}
    modules = ", ".join(lora.target_modules) or "all linear layers"
    return {"adapters": f"rank {lora.rank}, alpha {lora.alpha:g}, {modules}"}


def highlights(config: RunConfig) -> dict[str, Any]:
    """Return the keys of a run file that distinguish runs."""
    run, algorithm, trainer = config.run, config.algorithm, config.trainer
    return {
        "model": str(config.model.path),
        **describe_adapters(config),
        "data": ", ".join(part.source for part in config.data.parts),
        "reward": config.reward.function if config.algorithm.has_rewards else "none",
        "steps": (
            f"{config.first_version} to {config.last_version}, {run.prompts_per_step} prompt "
            f"groups of {run.samples_per_prompt}"
        ),
        "mode": f"{run.mode}, max_staleness {run.max_staleness}, seed {run.seed}",
        "algorithm": f"{algorithm.name}, {algorithm.aggregation}, kl {algorithm.kl_coefficient:g}",
        "clip": "none"
        if algorithm.clip_low is None
        else f"{algorithm.clip_low:g} below, {algorithm.clip_high:g} above",
        "correction": algorithm.correction
        if algorithm.correction == "none"
        else f"{algorithm.correction}, {algorithm.correction_level}",
        "learning_rate": (
            f"{trainer.learning_rate:g}, {trainer.schedule}, {trainer.warmup_steps} warm-up steps"
        ),
        "objects": config.objects_uri,
    }
