"""What only the pages of a run show besides its state, folded from its log: curves, reports of
workers, rewards by version.

Events are applied by one thread, in log order within each topic.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from relax_events.api.events import (
    Command,
    MetricsReported,
    PolicyVersionPublished,
    RunCommanded,
    TrainStepCommitted,
    WorkerHeartbeat,
)
from relax_events.api.runs import HealthState, RunConfig, RunState, StepCurves, settings_history
from relax_events.events.types import Event, RunDescribed

MAX_REPORTS = 720
"""Reports of a worker that are kept: an hour at the default interval."""
MAX_WORKERS = 512
MAX_COMPONENTS = 32
MAX_INTERVAL_SECONDS = 60.0
MICROS = 1e6
OWN_ID = "dashboard"
MAX_EVALUATIONS = 100_000


@dataclass(slots=True)
class Spread:
    """Count, mean, deviation and extremes of values, added one by one."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0
    low: float = math.inf
    high: float = -math.inf

    def add(self, value: float) -> None:
        """Add a value."""
        self.count += 1
        self.total += value
        self.squares += value * value
        self.low, self.high = min(self.low, value), max(self.high, value)

    def as_list(self) -> list[float]:
        """Return count, mean, deviation, lowest and highest."""
        mean = self.total / self.count
        variance = max(self.squares / self.count - mean * mean, 0.0)
        return [self.count, mean, math.sqrt(variance), self.low, self.high]


@dataclass(frozen=True, slots=True)
class Report:
    """A worker's metrics over an interval that ended at `at`."""

    at: int
    seconds: float
    policy_version: int
    values: dict[str, float]


@dataclass(slots=True, kw_only=True)
class RunFold(RunState):
    """The state behind the pages of a run: `RunState`, with all evaluations, and histories."""

    config: RunConfig
    max_evaluations: int = MAX_EVALUATIONS
    curves: StepCurves = field(default_factory=StepCurves)
    components: dict[str, dict[int, Spread]] = field(default_factory=dict)
    reports: dict[str, deque[Report]] = field(default_factory=dict)
    published_at: dict[int, int] = field(default_factory=dict)
    commands: deque[RunCommanded] = field(default_factory=lambda: deque(maxlen=200))
    resumes: list[int] = field(default_factory=list)
    changes: list[tuple[int, list[Any]]] = field(default_factory=list)
    """What changed in the run file, with the policy version from which on it holds."""
    health: HealthState = field(init=False)

    def __post_init__(self) -> None:
        self.health = HealthState.from_config(self.config, own_id=OWN_ID)

    def apply(self, event: Event) -> None:
        """Apply an event of the control log."""
        RunState.apply(self, event)
        self.health.apply(event)
        if isinstance(event, TrainStepCommitted):
            self.curves.apply(event)
        elif isinstance(event, PolicyVersionPublished):
            self.published_at[event.policy_version] = event.published_at
        elif isinstance(event, RunCommanded):
            self.commands.append(event)
            is_of_run = event.role is None and event.worker_id is None
            if is_of_run and event.command is Command.RESUME:
                self.resumes.append(event.commanded_at)
        elif isinstance(event, RunDescribed):
            self.changes = settings_history(self.descriptions, run_id=self.config.run.id)
        elif isinstance(event, MetricsReported):
            self._apply_report(event)
        elif isinstance(event, WorkerHeartbeat):
            self._forget_workers()

    def add_score(self, version: int, values: dict[str, float]) -> None:
        """Add a sample's reward and its components to the spreads of its version."""
        for name, value in values.items():
            spreads = self.components.get(name)
            if spreads is None:
                if len(self.components) >= MAX_COMPONENTS:
                    continue
                spreads = self.components[name] = {}
            spreads.setdefault(version, Spread()).add(value)

    def _apply_report(self, event: MetricsReported) -> None:
        reports = self.reports.get(event.worker_id)
        if reports is None:
            if len(self.reports) >= MAX_WORKERS:
                del self.reports[next(iter(self.reports))]
            reports = self.reports[event.worker_id] = deque(maxlen=MAX_REPORTS)
        seconds = (event.reported_at - reports[-1].at) / MICROS if reports else 0.0
        reports.append(
            Report(
                event.reported_at,
                min(max(seconds, 0.0), MAX_INTERVAL_SECONDS),
                event.policy_version,
                event.values,
            )
        )

    def _forget_workers(self) -> None:
        """Keep the newest workers where a long run had very many."""
        workers = self.workers
        if len(workers) > 2 * MAX_WORKERS:
            for name in sorted(workers, key=lambda name: workers[name].sent_at)[:MAX_WORKERS]:
                del workers[name]
