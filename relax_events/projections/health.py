"""What the control log says of the workers' health, and of what was done about it."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from enum import StrEnum

from relax_events.config import RunConfig
from relax_events.events.parts import Command, WorkerState
from relax_events.events.types import Event, RunCommanded, TrainStepCommitted, WorkerBeat

MICROS = 1_000_000


class Symptom(StrEnum):
    """What is wrong with a worker, or with the run as a whole."""

    SILENT = "silent"
    OVERDUE = "overdue"
    STUCK = "stuck"
    SLOW_START = "slow_start"
    STANDSTILL = "standstill"


class Tier(StrEnum):
    """What is done about it: one worker is started again, or all of the pipeline."""

    RESTART = "restart"
    RESTORE = "restore"


@dataclass(frozen=True, slots=True)
class Act:
    """A worker was asked to start again. The acts of one restore have the same time."""

    at: int
    tier: Tier
    symptom: Symptom
    worker_id: str
    role: str

    @classmethod
    def of(cls, event: RunCommanded) -> Act | None:
        """Read it off a command; None for one that the health manager did not give."""
        if event.command is not Command.RESTART or event.worker_id is None:
            return None
        try:
            tier, symptom = (
                Tier(event.arguments.get("tier", "")),
                Symptom(event.arguments.get("symptom", "")),
            )
        except ValueError:
            return None
        return cls(event.commanded_at, tier, symptom, event.worker_id, event.role or "")

    def command(self, *, reason: str) -> RunCommanded:
        """Return the command that says it on the log."""
        arguments = {"tier": self.tier.value, "symptom": self.symptom.value}
        return RunCommanded(
            command=Command.RESTART,
            role=self.role,
            worker_id=self.worker_id,
            reason=reason,
            arguments=arguments,
            commanded_at=self.at,
        )


@dataclass(frozen=True, slots=True)
class Heard:
    """A worker's newest beat, and when it was heard: by our own clock, so that others' clocks may
    be wrong.
    """

    beat: WorkerBeat
    at: int


class HealthState:
    """Feed it every event, in log order, with the time at which it was heard; it never looks
    anywhere else.

    Whoever hears nothing may be deaf. So the time counts only in which our own beats came back from
    the broker: after a pause in them, as when the broker was away or this process stood still,
    everyone has the full time again to be heard.
    """

    def __init__(self, *, own_id: str, gap_seconds: float, num_steps_kept: int) -> None:
        """Begin without having heard anything.

        Args:
            own_id: The worker whose beats are our own.
            gap_seconds: A longer pause between two of them means that nothing was to be heard.
            num_steps_kept: Train steps after which what was done before counts no more: with so
                many, something was issued since and trained.
        """
        self._own_id, self._gap = own_id, int(gap_seconds * MICROS)
        self._own_at: int | None = None
        self._steps: deque[int] = deque(maxlen=num_steps_kept)
        self.heard: dict[str, Heard] = {}
        self.listening_since = 0
        self.acts: list[Act] = []
        self.starts: Counter[str] = Counter()
        """Processes that began, by role, as far as we heard of them."""
        self.is_paused = self.is_over = self.is_given_up = False

    @classmethod
    def of(cls, config: RunConfig, *, own_id: str) -> HealthState:
        """Make the state for a run."""
        gap_seconds = max(config.workers.hung_seconds / 2, 3 * config.workers.beat_seconds)
        return cls(
            own_id=own_id, gap_seconds=gap_seconds, num_steps_kept=config.run.max_staleness + 2
        )

    def note(self, event: Event, *, at: int) -> None:
        """Take in an event that was heard at this time, in microseconds since the epoch."""
        if isinstance(event, WorkerBeat):
            if event.worker_id == self._own_id:
                self._note_own(at)
            else:
                self.starts[event.role] += self._is_start(event)
                self.heard[event.worker_id] = Heard(event, at)
        elif isinstance(event, TrainStepCommitted):
            self._steps.append(event.committed_at)
        elif isinstance(event, RunCommanded):
            self._note_command(event)

    def _is_start(self, beat: WorkerBeat) -> bool:
        """Tell whether this is the first beat of a process; while it starts it sends several."""
        if beat.state is not WorkerState.STARTING:
            return False
        heard = self.heard.get(beat.worker_id)
        return (
            heard is None
            or heard.beat.state is not WorkerState.STARTING
            or (heard.beat.host, heard.beat.pid) != (beat.host, beat.pid)
        )

    def _note_own(self, at: int) -> None:
        if self.is_deaf(at):
            self.listening_since = at
        self._own_at = at

    def _note_command(self, event: RunCommanded) -> None:
        act = Act.of(event)
        if act is not None and act not in self.acts:  # we have noted our own when we gave it
            self.acts.append(act)
        if event.role is not None:
            return
        if event.command is Command.STOP:
            self.is_over, self.is_given_up = True, "symptom" in event.arguments
        elif event.command is Command.PAUSE:
            self.is_paused = True
        elif event.command is Command.RESUME:
            self.is_over = self.is_paused = self.is_given_up = False
            self.acts.clear()

    def is_deaf(self, now: int) -> bool:
        """Tell whether not even our own beats come back."""
        return self._own_at is None or now - self._own_at > self._gap

    @property
    def last_step_at(self) -> int:
        """When the newest train step was committed; 0 before the first."""
        return self._steps[-1] if self._steps else 0

    def silent_micros(self, heard: Heard, *, now: int) -> int:
        """Return for how long a worker has not been heard though it could have been."""
        return now - max(heard.at, self.listening_since)

    def counted(self, tier: Tier, worker_id: str | None = None) -> list[int]:
        """Return when acts of a tier were done, each time once: those after which too few steps
        were committed to say that they helped.
        """
        helped = self._steps[0] if len(self._steps) == self._steps.maxlen else 0
        times = {
            act.at
            for act in self.acts
            if act.tier is tier and act.at >= helped and worker_id in (None, act.worker_id)
        }
        return sorted(times)

    def last_act(self, worker_id: str) -> int:
        """Return when something was last done to a worker; 0 when nothing was."""
        return max((act.at for act in self.acts if act.worker_id == worker_id), default=0)
