"""The state of a run as the controller, the progress display and the report need it: steps,
versions, outcomes, workers, metrics and commands.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import pairwise
from sys import intern
from typing import Any

import numpy as np

from relax_events.events.parts import Outcome, WorkerState
from relax_events.events.types import (
    Event,
    MetricsReported,
    PolicyEvaluated,
    PolicyVersionPublished,
    PromptGroupEnded,
    RunCommanded,
    RunDescribed,
    TrainStepCommitted,
    WorkerHeartbeat,
)
from relax_events.projections.base import RunPhase
from relax_events.staleness import is_external, was_left
from relax_events.topics.names import EVALUATIONS, GROUP_OUTCOMES, HEARTBEATS, METRICS, TRAIN_STEPS

EMPTY = np.zeros(0, np.int32)
MAX_KEPT = 128
"""Newest steps, evaluations and reports that are kept: more than any display of a running run
shows."""
MAX_RECENT_IDS = 20_000
"""Newest prompt group ids among which a repeated outcome is recognised."""
RUN_STATE_TOPICS = (
    TRAIN_STEPS,
    GROUP_OUTCOMES,
    *HEARTBEATS.values(),
    *METRICS.values(),
    EVALUATIONS,
)


@dataclass(slots=True)
class RunState(RunPhase):
    """The state of a run, folded from the control log.

    Events are applied in log order within each topic; topics have no order among each other. The
    first publication may be that of any policy version, because it sums up the log before it: the
    steps and outcomes behind it may be applied before it. Memory is bounded: unless `keeps_all` is
    set, only the newest steps, evaluations and metrics are kept. `critic_metrics` holds the metrics
    of the critic's steps by train step; `metrics` holds the newest report of every other worker.
    `recent_outcomes` holds the newest ended prompt groups, oldest first; None is the outcome of one
    that its step did not need. `steps` are kept without their lists of samples. `skipped_at` and
    `failing_since` say when an update was skipped last, and since when prompt groups fail in a row,
    0 where they don't.
    """

    keeps_all: bool = False
    max_evaluations: int = MAX_KEPT
    policy_version: int = -1
    num_steps: int = 0
    steps: list[TrainStepCommitted] = field(default_factory=list)
    evaluations: dict[tuple[int, str], PolicyEvaluated] = field(default_factory=dict)
    outcomes: Counter[str] = field(default_factory=Counter)
    recent_outcomes: dict[str, Outcome | None] = field(default_factory=dict)
    num_consecutive_failures: int = 0
    failing_since: int = 0
    last_failure: str = ""
    workers: dict[str, WorkerHeartbeat] = field(default_factory=dict)
    metrics: dict[str, MetricsReported] = field(default_factory=dict)
    num_updates_skipped: int = 0
    skipped_at: int = 0
    num_consecutive_skips: int = 0
    critic_metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    descriptions: list[RunDescribed] = field(default_factory=list)

    def apply(self, event: Event) -> None:
        """Apply an event of the control log."""
        if isinstance(event, TrainStepCommitted):
            self.num_steps += 1
            self._apply_update(event)
            self.steps.append(strip_samples(event))
            self._bound(self.steps)
        elif isinstance(event, PolicyVersionPublished):
            self._apply_version(event)
        elif isinstance(event, PromptGroupEnded):
            self._apply_outcome(event)
        elif isinstance(event, PolicyEvaluated):
            self.evaluations.setdefault((event.policy_version, event.dataset), event)
            self._bound(self.evaluations, limit=self.max_evaluations)
        elif isinstance(event, WorkerHeartbeat):
            self.workers[event.worker_id] = event
        elif isinstance(event, MetricsReported):
            if event.role == "critic" and "value_loss" in event.values:
                self.critic_metrics[event.policy_version - 1] = event.values
                self._bound(self.critic_metrics)
            else:
                self.metrics[event.worker_id] = event
        elif isinstance(event, RunDescribed):
            self.descriptions.append(event)
        elif isinstance(event, RunCommanded) and self.apply_command(event):
            self.num_consecutive_failures = self.num_consecutive_skips = 0
            self.failing_since = 0

    def _apply_update(self, step: TrainStepCommitted) -> None:
        """Count skipped updates; consecutive skips count only since the run was last resumed."""
        self.num_updates_skipped += step.update_skipped
        if step.update_skipped:
            self.skipped_at = step.committed_at
        self.num_consecutive_skips = (
            self.num_consecutive_skips + (step.committed_at > self.resumed_at)
            if step.update_skipped
            else 0
        )

    def _apply_version(self, event: PolicyVersionPublished) -> None:
        if self.policy_version < 0:  # what it counts lies before the records that are read
            self.num_steps += event.num_steps_before
            self.outcomes.update(event.outcome_counts_before)
        self.policy_version = max(self.policy_version, event.policy_version)

    def _bound(self, kept: list[Any] | dict[Any, Any], *, limit: int = MAX_KEPT) -> None:
        """Drop the older half once a collection holds twice the limit."""
        if self.keeps_all or len(kept) < 2 * limit:
            return
        if isinstance(kept, list):
            del kept[:-limit]
        else:
            for key in list(kept)[:-limit]:
                del kept[key]

    def _apply_outcome(self, event: PromptGroupEnded) -> None:
        if event.prompt_group_id in self.recent_outcomes or is_external(event.prompt_group_id):
            return
        self.recent_outcomes[event.prompt_group_id] = None if was_left(event) else event.outcome
        self._bound(self.recent_outcomes, limit=MAX_RECENT_IDS)
        self.outcomes[event.outcome.value] += 1
        if event.outcome is Outcome.FAILED and event.ended_at > self.resumed_at:
            self.num_consecutive_failures += 1
            self.failing_since = self.failing_since or event.ended_at
            self.last_failure = event.reason
        elif event.outcome is Outcome.TRAINED:
            self.num_consecutive_failures = self.failing_since = 0

    @property
    def description(self) -> RunDescribed | None:
        """The newest description of the run."""
        return self.descriptions[-1] if self.descriptions else None

    @property
    def imported_at(self) -> int:
        """When the log was imported under the id that it has, in microseconds since the epoch; 0
        where it always had that id.
        """
        return max(
            (
                later.described_at
                for earlier, later in pairwise(self.descriptions)
                if later.run_id != earlier.run_id
            ),
            default=0,
        )

    @property
    def reward(self) -> float | None:
        """The mean reward of the newest step; None before the first step and in a run without
        rewards.
        """
        return self.steps[-1].metrics.get("reward_mean") if self.steps else None


def is_silent(heartbeat: WorkerHeartbeat, *, seconds: float, newest_at: int) -> bool:
    """Return whether a worker's heartbeat is overdue by so many seconds. A worker that starts or
    has stopped owes no heartbeat.

    The age is measured against the newest heartbeat of any worker: while the broker is unreachable
    no heartbeat arrives, and no worker is at fault.
    """
    return heartbeat.sent_at < newest_at - int(seconds * 1e6) and heartbeat.state not in (
        WorkerState.STOPPED,
        WorkerState.STARTING,
    )


def strip_samples(step: TrainStepCommitted) -> TrainStepCommitted:
    """Return a step without its lists of samples and offsets, a tenth of its size, with interned
    metric names.
    """
    metrics, phases = (
        {intern(name): value for name, value in named.items()}
        for named in (step.metrics, step.phase_seconds)
    )
    of_samples: dict[str, Any] = {"prompt_group_ids": [], "sample_ids": [], "consumed": []}
    of_samples |= dict.fromkeys(("partitions", "offsets", "ranks", "micro_batches"), EMPTY)
    return replace(step, **of_samples, metrics=metrics, phase_seconds=phases)


def count_samples(step: TrainStepCommitted) -> int:
    """Return the number of samples of a train step."""
    return sum(step.staleness_counts)


def count_sample_records(step: TrainStepCommitted) -> int:
    """Return how many records of advantage.samples hold the samples of a train step."""
    return len(set(step.positions))


def max_sample_staleness(step: TrainStepCommitted) -> int:
    """Return the staleness of the oldest sample of a train step, in policy versions."""
    return max((age for age, count in enumerate(step.staleness_counts) if count), default=0)
