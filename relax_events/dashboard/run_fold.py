"""What the pages of a run show, folded from its log: `RunState`, and curves of bounded size.

Events are applied by one thread, in log order within each topic.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from dataclasses import dataclass, field

from relax_events.config import RunConfig
from relax_events.events.parts import now_micros
from relax_events.events.types import (
    Event,
    MetricsReported,
    PolicyEvaluated,
    PolicyVersionPublished,
    RunCommanded,
    TrainStepCommitted,
    WorkerHeartbeat,
)
from relax_events.projections.health import HealthState
from relax_events.projections.run_state import RunState
from relax_events.projections.step_rates import compute_rates

MAX_REPORTS = 720
"""Reports of a worker that are kept: an hour at the default interval."""
MAX_WORKERS = 512
MAX_COMPONENTS = 32
MAX_INTERVAL_SECONDS = 60.0
MICROS = 1e6
OWN_ID = "dashboard"
RATES = ("step_seconds", "tokens_per_second", "samples_per_second")


class StepCurves:
    """A column of floats for each metric of the train steps; NaN where a step lacks it."""

    def __init__(self) -> None:
        self.steps, self.committed_at = array("q"), array("q")
        self.columns: dict[str, array[float]] = {}
        self.phases: dict[str, array[float]] = {}
        self.staleness_counts: list[int] = []

    def apply(self, step: TrainStepCommitted) -> None:
        """Append a step."""
        self.steps.append(step.train_step)
        self.committed_at.append(step.committed_at)
        rates = compute_rates([step])
        values = {name: getattr(rates, name) for name in RATES}
        self._append(
            self.columns,
            step.metrics | {name: rate for name, rate in values.items() if rate is not None},
        )
        self._append(self.phases, step.phase_seconds)
        counts = step.staleness_counts
        self.staleness_counts += [0] * (len(counts) - len(self.staleness_counts))
        for age, count in enumerate(counts):
            self.staleness_counts[age] += count

    def _append(self, columns: dict[str, array[float]], values: dict[str, float]) -> None:
        length = len(self.steps)
        for name, value in values.items():
            column = columns.get(name)
            if column is None:
                column = columns[name] = array("f", [math.nan]) * (length - 1)
            column.append(value)
        for column in columns.values():
            if len(column) < length:
                column.append(math.nan)

    def recent(self, name: str, count: int) -> list[float]:
        """Return a metric's newest finite values, oldest first."""
        return [value for value in self.columns.get(name, ())[-count:] if math.isfinite(value)]


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


@dataclass(slots=True)
class RunFold:
    """The state behind the pages of a run."""

    config: RunConfig
    state: RunState = field(default_factory=RunState)
    curves: StepCurves = field(default_factory=StepCurves)
    components: dict[str, dict[int, Spread]] = field(default_factory=dict)
    reports: dict[str, deque[Report]] = field(default_factory=dict)
    published_at: dict[int, int] = field(default_factory=dict)
    evaluations: list[PolicyEvaluated] = field(default_factory=list)
    commands: deque[RunCommanded] = field(default_factory=lambda: deque(maxlen=200))
    silent_since: dict[str, int] = field(default_factory=dict)
    skipped_at: int = 0
    failing_since: int = 0
    health: HealthState = field(init=False)

    def __post_init__(self) -> None:
        self.health = HealthState.from_config(self.config, own_id=OWN_ID)

    def apply(self, event: Event) -> None:
        """Apply an event of the control log."""
        self.state.apply(event)
        self.health.apply(event)
        if isinstance(event, TrainStepCommitted):
            self.curves.apply(event)
            if event.update_skipped:
                self.skipped_at = event.committed_at
        elif isinstance(event, PolicyVersionPublished):
            self.published_at[event.policy_version] = event.published_at
        elif isinstance(event, PolicyEvaluated):
            self.evaluations.append(event)
        elif isinstance(event, RunCommanded):
            self.commands.append(event)
        elif isinstance(event, MetricsReported):
            self._apply_report(event)
        elif isinstance(event, WorkerHeartbeat):
            self._forget_workers()
        if not self.state.num_consecutive_failures:
            self.failing_since = 0
        elif not self.failing_since:
            self.failing_since = getattr(event, "ended_at", now_micros())

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
        workers = self.state.workers
        if len(workers) > 2 * MAX_WORKERS:
            oldest = sorted(workers, key=lambda name: workers[name].sent_at)[:MAX_WORKERS]
            for name in oldest:
                del workers[name]
