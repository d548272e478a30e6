"""Chooses the policy version to export, from the log."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from relax_events.errors import ConfigError
from relax_events.events.parts import CheckpointRef, ObjectRef
from relax_events.events.types import PolicyEvaluated
from relax_events.history.run_log import RunLog
from relax_events.projections.base import apply_events
from relax_events.projections.run_state import RunState
from relax_events.topics.names import COMMANDS, EVALUATIONS, POLICY_VERSIONS, TRAIN_STEPS

ENTITIES = (
    POLICY_VERSIONS,
    TRAIN_STEPS,
    EVALUATIONS,
    COMMANDS,
)
METRIC = re.compile(r"(?:(?P<dataset>[^/]+)/)?(?P<name>reward_mean|pass_at_(?P<k>\d+))")
MAX_LISTED = 20


@dataclass(frozen=True, slots=True)
class PublishedVersions:
    """A run's versions as its log has them.

    Attributes:
        run_id: The run.
        artifacts: The weights of each published version.
        checkpoints: The checkpoint of each version that has one.
        digests: The committed digest of the weights, by version.
        evaluations: All evaluations.
        state: The folded control log.
    """

    run_id: str
    artifacts: Mapping[int, ObjectRef]
    checkpoints: Mapping[int, CheckpointRef] = field(default_factory=dict)
    digests: Mapping[int, bytes] = field(default_factory=dict)
    evaluations: tuple[PolicyEvaluated, ...] = ()
    state: RunState = field(default_factory=RunState)


def read_versions(log: RunLog) -> PublishedVersions:
    """Read a run's versions, steps and evaluations from its log."""
    state = RunState(keeps_all=True)
    apply_events(log.read_control_events(*ENTITIES), state)
    named = [step.checkpoint for step in state.steps if step.checkpoint is not None]
    return PublishedVersions(
        log.config.run.id,
        artifacts={version: record.event.artifact for version, record in log.versions.items()},
        checkpoints={reference.policy_version: reference for reference in named},
        digests={step.policy_version: step.weights_digest for step in state.steps},
        evaluations=tuple(state.evaluations.values()),
        state=state,
    )


def choose_version(versions: PublishedVersions, *, version: int | None, best: str) -> int:
    """Return the version to export.

    Args:
        versions: Of the run.
        version: The version of `--version`; None for the best or the newest.
        best: Metric of the evaluations, as `METRIC` or `DATASET/METRIC`; empty for the newest.
    Raises:
        ConfigError: There is no such version or metric, or both were given; the text lists the
            existing ones.
    """
    if version is not None and best:
        raise ConfigError(f"--version {version} and --best {best} name a version each; give one")
    if not versions.artifacts:
        raise ConfigError(f"run {versions.run_id} has not published a version yet; export later")
    if best:
        return choose_best(versions.run_id, versions.evaluations, metric=best)
    newest = max(versions.artifacts)
    if version is None:
        return newest
    if version not in versions.artifacts:
        raise ConfigError(
            f"run {versions.run_id} has no version {version}; it has published versions "
            f"{min(versions.artifacts)} to {newest}"
        )
    return version


def choose_best(run_id: str, evaluations: Iterable[PolicyEvaluated], *, metric: str) -> int:
    """Return the version with the highest value of a metric; of equal versions the newer.

    Without a dataset in its name, the metric is the mean over all datasets that have it, and only
    versions that were evaluated on all of them count.

    Raises:
        ConfigError: No evaluation has the metric; the text lists the metrics of the evaluations.
    """
    events = list(evaluations)
    metrics = list_metrics(events)
    match = METRIC.fullmatch(metric)
    if not metrics:
        raise ConfigError(
            f"run {run_id} has no evaluation, so it has no version with the best {metric}; set "
            "evaluation.datasets in the run file, or give --version"
        )
    if match is None or metric not in metrics:
        raise ConfigError(
            f"run {run_id} has no evaluation metric {metric!r}; it has {', '.join(metrics)}"
        )
    values: dict[int, list[float]] = defaultdict(list)
    datasets = set()
    for event in events:
        value = read_metrics(event).get(match["name"])
        if value is not None and match["dataset"] in (None, event.dataset):
            values[event.policy_version].append(value)
            datasets.add(event.dataset)
    complete = {
        version: sum(some) / len(some)
        for version, some in values.items()
        if len(some) == len(datasets)
    }
    if not complete:
        raise ConfigError(
            f"run {run_id} has no version that was evaluated on all of "
            f"{', '.join(sorted(datasets))}; name a dataset: --best DATASET/{match['name']}"
        )
    return max(complete, key=lambda version: (complete[version], version))


def list_metrics(evaluations: Iterable[PolicyEvaluated]) -> list[str]:
    """Return the names of the metrics by which a version can be chosen."""
    names = {
        name
        for event in evaluations
        for metric in read_metrics(event)
        for name in (metric, f"{event.dataset}/{metric}")
    }
    return sorted(names, key=lambda name: ("/" in name, name))


def read_metrics(event: PolicyEvaluated) -> dict[str, float]:
    """Return the metrics of an evaluation of which a higher value is better."""
    reward = {} if event.reward_mean is None else {"reward_mean": event.reward_mean}
    return reward | {f"pass_at_{k}": value for k, value in event.pass_at_k.items()}


def format_versions(versions: Collection[int]) -> str:
    """Return version numbers as a list; of many, the newest."""
    if not versions:
        return "none"
    newest = sorted(versions)[-MAX_LISTED:]
    omitted = "..., " if len(versions) > len(newest) else ""
    return omitted + ", ".join(map(str, newest))
