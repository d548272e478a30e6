"""The state of a run, rebuilt from the control topics by whoever wants it: the controller, the progress display, the report."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from sys import intern
from typing import Any

import numpy as np

from relax_events.events.parts import Command, Outcome, WorkerState
from relax_events.events.types import (
    Event,
    MetricsReported,
    PolicyEvaluated,
    PolicyVersionPublished,
    PromptGroupEnded,
    RunCommanded,
    RunDescribed,
    TrainStepCommitted,
    WorkerBeat,
)
from relax_events.pipeline.worker import STEPS_NOT_FINITE
from relax_events.policy import is_guest

NOTHING = np.zeros(0, np.int32)
FOLLOWED = ("control.train-steps", "control.group-outcomes", "control.heartbeats", "control.metrics", "control.evaluations")


@dataclass(slots=True)
class RunState:
    """What the control log has said so far. Feed it every event, in log order; it never looks anywhere else.

    `not_finite` are the reports of steps whose loss or gradient was no finite number. `critic_figures` are those of the critic's steps, by
    train step; `metrics` is the newest report of each worker otherwise. `steps` are without what they name of each sample.
    """

    policy_version: int = -1
    steps: list[TrainStepCommitted] = field(default_factory=list)
    evaluations: dict[tuple[int, str], PolicyEvaluated] = field(default_factory=dict)
    outcomes: Counter[str] = field(default_factory=Counter)
    ended_group_ids: set[str] = field(default_factory=set)
    failed_in_a_row: int = 0
    last_failure: str = ""
    workers: dict[str, WorkerBeat] = field(default_factory=dict)
    metrics: dict[str, MetricsReported] = field(default_factory=dict)
    not_finite: list[MetricsReported] = field(default_factory=list)
    critic_figures: dict[int, dict[str, float]] = field(default_factory=dict)
    ended: RunCommanded | None = None
    resumed_at: int = 0
    is_paused: bool = False
    described: RunDescribed | None = None

    def note(self, event: Event) -> None:
        """Take in an event."""
        if isinstance(event, TrainStepCommitted):
            self.steps.append(without_its_samples(event))
        elif isinstance(event, PolicyVersionPublished):
            self.policy_version = max(self.policy_version, event.policy_version)
        elif isinstance(event, PromptGroupEnded):
            self._note_end(event)
        elif isinstance(event, PolicyEvaluated):
            self.evaluations.setdefault((event.policy_version, event.dataset), event)
        elif isinstance(event, WorkerBeat):
            self.workers[event.worker_id] = event
        elif isinstance(event, MetricsReported):
            if STEPS_NOT_FINITE in event.values:
                self.not_finite.append(event)
            elif "value_loss" in event.values:
                self.critic_figures[event.policy_version - 1] = event.values
            else:
                self.metrics[event.worker_id] = event
        elif isinstance(event, RunDescribed):
            self.described = event
        elif isinstance(event, RunCommanded) and event.role is None:
            self._note_command(event)

    def _note_command(self, event: RunCommanded) -> None:
        if event.command is Command.STOP:
            self.ended = event
        elif event.command is Command.PAUSE:
            self.is_paused = True
        elif event.command is Command.RESUME:
            self.ended, self.is_paused, self.failed_in_a_row, self.resumed_at = None, False, 0, event.commanded_at

    def _note_end(self, event: PromptGroupEnded) -> None:
        if event.prompt_group_id in self.ended_group_ids or is_guest(event.prompt_group_id):
            return
        self.ended_group_ids.add(event.prompt_group_id)
        self.outcomes[event.outcome.value] += 1
        if event.outcome is Outcome.FAILED and event.ended_at > self.resumed_at:
            self.failed_in_a_row += 1
            self.last_failure = event.reason
        elif event.outcome is Outcome.TRAINED:
            self.failed_in_a_row = 0

    @property
    def num_steps(self) -> int:
        """Committed train steps."""
        return len(self.steps)

    @property
    def step_lost(self) -> MetricsReported | None:
        """The report of a step that was no finite number on a second try either, since the run was last taken up."""
        seen: set[tuple[str, int]] = set()
        for report in self.not_finite:
            if report.reported_at > self.resumed_at:
                place = (report.worker_id, report.policy_version)
                if place in seen:
                    return report
                seen.add(place)
        return None

    @property
    def reward(self) -> float | None:
        """Mean reward of the newest step; None before the first, and where nothing is rewarded."""
        return self.steps[-1].figures.get("reward_mean") if self.steps else None


def is_silent(beat: WorkerBeat, *, seconds: float, newest_at: int) -> bool:
    """Tell whether a worker owes us a beat since so long; one that has stopped owes none, nor does one that still loads what it needs.

    Measured against the newest beat of anybody: while the broker is away nobody's comes, and nobody is to blame.
    """
    return beat.beat_at < newest_at - int(seconds * 1e6) and beat.state not in (WorkerState.STOPPED, WorkerState.STARTING)


def without_its_samples(step: TrainStepCommitted) -> TrainStepCommitted:
    """Return a step as it is kept over a whole run: a tenth of its size, since samples and places go and names are shared."""
    figures, phases = ({intern(name): value for name, value in named.items()} for named in (step.figures, step.phase_seconds))
    of_samples: dict[str, Any] = {"prompt_group_ids": [], "sample_ids": [], "consumed": []}
    of_samples |= dict.fromkeys(("partitions", "offsets", "ranks", "micro_batches"), NOTHING)
    return replace(step, **of_samples, figures=figures, phase_seconds=phases)


def num_samples(step: TrainStepCommitted) -> int:
    """Return how many samples a train step had."""
    return sum(step.staleness_counts)


def staleness_max(step: TrainStepCommitted) -> int:
    """Return how many policy versions the oldest sample of a train step was behind."""
    return max((age for age, count in enumerate(step.staleness_counts) if count), default=0)
