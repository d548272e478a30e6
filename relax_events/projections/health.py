"""The workers' health and the health manager's interventions, folded from the control log."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from relax_events.config import RunConfig
from relax_events.events.parts import Command, WorkerState, now_micros
from relax_events.events.types import Event, RunCommanded, TrainStepCommitted, WorkerHeartbeat
from relax_events.projections.base import RunPhase

MICROS = 1_000_000


class Symptom(StrEnum):
    """What is wrong with a worker, or with the run as a whole."""

    SILENT = "silent"
    OVERDUE = "overdue"
    STUCK = "stuck"
    SLOW_START = "slow_start"
    STANDSTILL = "standstill"


PIPELINE_REASON = "pipeline restart: "
"""Before the reason of a restart of the pipeline."""


class RecoveryLevel(StrEnum):
    """The scope of an intervention: restart one worker, or restart all workers of the pipeline."""

    WORKER_RESTART = "restart"
    PIPELINE_RESTART = "restore"


@dataclass(frozen=True, slots=True)
class Intervention:
    """A restart that the health manager commanded for one worker. All commands of one pipeline
    restart carry the same time.
    """

    at: int
    level: RecoveryLevel
    symptom: Symptom
    worker_id: str
    role: str
    reason: str = field(default="", compare=False)

    @classmethod
    def from_command(cls, event: RunCommanded) -> Intervention | None:
        """Parse a command; return None for a command that the health manager did not send."""
        if event.command is not Command.RESTART or event.worker_id is None:
            return None
        try:
            level = RecoveryLevel(event.arguments.get("tier", ""))
            symptom = Symptom(event.arguments.get("symptom", ""))
        except ValueError:
            return None
        worker_id, role = event.worker_id, event.role or ""
        return cls(event.commanded_at, level, symptom, worker_id, role, event.reason)

    def to_command(self, *, reason: str) -> RunCommanded:
        """Return the command that records the intervention on the log."""
        arguments = {"tier": self.level.value, "symptom": self.symptom.value}
        return RunCommanded(
            command=Command.RESTART,
            role=self.role,
            worker_id=self.worker_id,
            reason=reason,
            arguments=arguments,
            commanded_at=self.at,
        )


@dataclass(frozen=True, slots=True)
class LastHeartbeat:
    """A worker's newest heartbeat, with the time at which this process received it, by its own
    clock: the workers' clocks may be wrong.
    """

    heartbeat: WorkerHeartbeat
    received_at: int


class HealthState(RunPhase):
    """The newest heartbeat of each worker and the interventions since the last resume.

    Silence may be this process's own fault. Timeouts therefore only advance while its own
    heartbeats come back from the broker. After a gap in them, for example a broker outage, every
    worker has the full timeout again.
    """

    def __init__(
        self,
        *,
        own_id: str,
        gap_seconds: float,
        num_steps_kept: int,
        clock: Callable[[], int] = now_micros,
    ) -> None:
        """Begin without any heartbeat.

        Args:
            own_id: Worker id of this process.
            gap_seconds: A longer gap between two own heartbeats means that nothing could be
                received.
            num_steps_kept: An intervention counts as successful once so many train steps are
                committed after it: then at least one prompt group was issued since and trained.
            clock: Returns the time at which an event is applied, in microseconds since the epoch.
        """
        super().__init__()
        self._own_id, self._gap = own_id, int(gap_seconds * MICROS)
        self._clock = clock
        self._own_at: int | None = None
        self._steps: deque[int] = deque(maxlen=num_steps_kept)
        self.last_heartbeats: dict[str, LastHeartbeat] = {}
        self.connected_since = 0
        self.interventions: list[Intervention] = []
        self.num_starts: Counter[str] = Counter()
        """Started processes by role, as far as their heartbeats were received."""

    @classmethod
    def from_config(cls, config: RunConfig, *, own_id: str) -> HealthState:
        """Build the state for a run."""
        gap_seconds = max(
            config.workers.heartbeat_timeout_seconds / 2, 3 * config.workers.heartbeat_seconds
        )
        return cls(
            own_id=own_id, gap_seconds=gap_seconds, num_steps_kept=config.run.max_staleness + 2
        )

    def apply(self, event: Event) -> None:
        """Apply an event, received now."""
        at = self._clock()
        if isinstance(event, WorkerHeartbeat):
            if event.worker_id == self._own_id:
                self._apply_own(at)
            else:
                self.num_starts[event.role] += self._is_start(event)
                self.last_heartbeats[event.worker_id] = LastHeartbeat(event, at)
        elif isinstance(event, TrainStepCommitted):
            self._steps.append(event.committed_at)
        elif isinstance(event, RunCommanded):
            self._apply_command(event)

    def _is_start(self, heartbeat: WorkerHeartbeat) -> bool:
        """Return whether this is the first heartbeat of a process; it sends several while it
        starts.
        """
        if heartbeat.state is not WorkerState.STARTING:
            return False
        last = self.last_heartbeats.get(heartbeat.worker_id)
        return (
            last is None
            or last.heartbeat.state is not WorkerState.STARTING
            or (last.heartbeat.host, last.heartbeat.pid) != (heartbeat.host, heartbeat.pid)
        )

    def _apply_own(self, at: int) -> None:
        if self.is_partitioned(at):
            self.connected_since = at
        self._own_at = at

    def _apply_command(self, event: RunCommanded) -> None:
        act = Intervention.from_command(event)
        # own commands were applied when they were sent
        if act is not None and act not in self.interventions:
            self.interventions.append(act)
        if self.apply_command(event):
            self.interventions.clear()

    @property
    def is_aborted(self) -> bool:
        """Whether the run was stopped for a symptom."""
        return self.ended is not None and "symptom" in self.ended.arguments

    def is_partitioned(self, now: int) -> bool:
        """Return whether this process's own heartbeats do not come back from the broker."""
        return self._own_at is None or now - self._own_at > self._gap

    @property
    def last_step_at(self) -> int:
        """Commit time of the newest train step; 0 before the first."""
        return self._steps[-1] if self._steps else 0

    def silence_micros(self, last: LastHeartbeat, *, now: int) -> int:
        """Return for how long no heartbeat of a worker was received although it could have been."""
        return now - max(last.received_at, self.connected_since)

    def unrecovered(self, tier: RecoveryLevel, worker_id: str | None = None) -> list[int]:
        """Return the times of interventions of a level, without duplicates, that too few committed
        steps followed to count as successful.
        """
        times = {
            act.at
            for act in self._list_unrecovered()
            if act.level is tier and worker_id in (None, act.worker_id)
        }
        return sorted(times)

    def find_first_unrecovered(self) -> Intervention | None:
        """Return the first of the interventions that did not help."""
        return min(self._list_unrecovered(), key=lambda act: act.at, default=None)

    def _list_unrecovered(self) -> list[Intervention]:
        helped = self._steps[0] if len(self._steps) == self._steps.maxlen else 0
        return [act for act in self.interventions if act.at >= helped]

    def last_intervention_at(self, worker_id: str) -> int:
        """Return the time of the newest intervention on a worker; 0 if there was none."""
        return max((act.at for act in self.interventions if act.worker_id == worker_id), default=0)
