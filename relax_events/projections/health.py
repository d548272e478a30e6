"""What the control log says of the workers' health, and of what was done about it."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from relax_events.config import RunConfig
from relax_events.events.parts import Command, WorkerState, now_micros
from relax_events.events.types import Event, RunCommanded, TrainStepCommitted, WorkerBeat

MICROS = 1_000_000


class Symptom(StrEnum):
    """What is wrong with a worker, or with the run as a whole."""

    SILENT = "silent"
    OVERDUE = "overdue"
    STUCK = "stuck"
    SLOW_START = "slow_start"
    STANDSTILL = "standstill"


class RecoveryLevel(StrEnum):
    """What is done about it: one worker is started again, or all of the pipeline."""

    WORKER_RESTART = "restart"
    PIPELINE_RESTART = "restore"


@dataclass(frozen=True, slots=True)
class Intervention:
    """A worker was asked to start again. The acts of one restore have the same time."""

    at: int
    level: RecoveryLevel
    symptom: Symptom
    worker_id: str
    role: str

    @classmethod
    def from_command(cls, event: RunCommanded) -> Intervention | None:
        """Read it off a command; None for one that the health manager did not give."""
        if event.command is not Command.RESTART or event.worker_id is None:
            return None
        try:
            tier, symptom = (
                RecoveryLevel(event.arguments.get("tier", "")),
                Symptom(event.arguments.get("symptom", "")),
            )
        except ValueError:
            return None
        return cls(event.commanded_at, tier, symptom, event.worker_id, event.role or "")

    def to_command(self, *, reason: str) -> RunCommanded:
        """Return the command that says it on the log."""
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
    """A worker's newest beat, and when it was heard: by our own clock, so that others' clocks may
    be wrong.
    """

    heartbeat: WorkerBeat
    received_at: int


class HealthState:
    """Feed it every event, in log order, with the time at which it was heard; it never looks
    anywhere else.

    Whoever hears nothing may be deaf. So the time counts only in which our own beats came back from
    the broker: after a pause in them, as when the broker was away or this process stood still,
    everyone has the full time again to be heard.
    """

    def __init__(
        self,
        *,
        own_id: str,
        gap_seconds: float,
        num_steps_kept: int,
        clock: Callable[[], int] = now_micros,
    ) -> None:
        """Begin without having heard anything.

        Args:
            own_id: The worker whose beats are our own.
            gap_seconds: A longer pause between two of them means that nothing was to be heard.
            num_steps_kept: Train steps after which what was done before counts no more: with so
                many, something was issued since and trained.
        """
        self._own_id, self._gap = own_id, int(gap_seconds * MICROS)
        self._clock = clock
        self._own_at: int | None = None
        self._steps: deque[int] = deque(maxlen=num_steps_kept)
        self.last_heartbeats: dict[str, LastHeartbeat] = {}
        self.connected_since = 0
        self.interventions: list[Intervention] = []
        self.num_starts: Counter[str] = Counter()
        """Processes that began, by role, as far as we heard of them."""
        self.is_paused = self.is_over = self.is_aborted = False

    @classmethod
    def from_config(cls, config: RunConfig, *, own_id: str) -> HealthState:
        """Make the state for a run."""
        gap_seconds = max(config.workers.heartbeat_timeout_seconds / 2, 3 * config.workers.heartbeat_seconds)
        return cls(
            own_id=own_id, gap_seconds=gap_seconds, num_steps_kept=config.run.max_staleness + 2
        )

    def apply(self, event: Event) -> None:
        """Apply an event, received now."""
        at = self._clock()
        if isinstance(event, WorkerBeat):
            if event.worker_id == self._own_id:
                self._note_own(at)
            else:
                self.num_starts[event.role] += self._is_start(event)
                self.last_heartbeats[event.worker_id] = LastHeartbeat(event, at)
        elif isinstance(event, TrainStepCommitted):
            self._steps.append(event.committed_at)
        elif isinstance(event, RunCommanded):
            self._note_command(event)

    def _is_start(self, beat: WorkerBeat) -> bool:
        """Tell whether this is the first beat of a process; while it starts it sends several."""
        if beat.state is not WorkerState.STARTING:
            return False
        heard = self.last_heartbeats.get(beat.worker_id)
        return (
            heard is None
            or heard.heartbeat.state is not WorkerState.STARTING
            or (heard.heartbeat.host, heard.heartbeat.pid) != (beat.host, beat.pid)
        )

    def _note_own(self, at: int) -> None:
        if self.is_partitioned(at):
            self.connected_since = at
        self._own_at = at

    def _note_command(self, event: RunCommanded) -> None:
        act = Intervention.from_command(event)
        if act is not None and act not in self.interventions:  # we have noted our own when we gave it
            self.interventions.append(act)
        if event.role is not None:
            return
        if event.command is Command.STOP:
            self.is_over, self.is_aborted = True, "symptom" in event.arguments
        elif event.command is Command.PAUSE:
            self.is_paused = True
        elif event.command is Command.RESUME:
            self.is_over = self.is_paused = self.is_aborted = False
            self.interventions.clear()

    def is_partitioned(self, now: int) -> bool:
        """Tell whether not even our own beats come back."""
        return self._own_at is None or now - self._own_at > self._gap

    @property
    def last_step_at(self) -> int:
        """When the newest train step was committed; 0 before the first."""
        return self._steps[-1] if self._steps else 0

    def silence_micros(self, heard: LastHeartbeat, *, now: int) -> int:
        """Return for how long a worker has not been heard though it could have been."""
        return now - max(heard.received_at, self.connected_since)

    def unrecovered(self, tier: RecoveryLevel, worker_id: str | None = None) -> list[int]:
        """Return when acts of a tier were done, each time once: those after which too few steps
        were committed to say that they helped.
        """
        helped = self._steps[0] if len(self._steps) == self._steps.maxlen else 0
        times = {
            act.at
            for act in self.interventions
            if act.level is tier and act.at >= helped and worker_id in (None, act.worker_id)
        }
        return sorted(times)

    def last_intervention_at(self, worker_id: str) -> int:
        """Return when something was last done to a worker; 0 when nothing was."""
        return max((act.at for act in self.interventions if act.worker_id == worker_id), default=0)
