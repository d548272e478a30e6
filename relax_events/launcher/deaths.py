"""How often a worker has died without progress, and what follows from it: the next start, or the
end of the run. Values alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self

from relax_events.events.types import WorkerBeat

BACKOFF_SECONDS = (0.0, 2.0, 10.0, 30.0)
"""Waited before a worker is started again, by how often it has died in a row without progress of
its own."""
ROLES_WITHOUT_RECORDS = frozenset({"trainer", "critic", "controller", "metrics"})
"""What these have processed is lost with the process: a new one does it again. Only the run's steps
tell that they get on."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What the control log says that was achieved so far.

    Attributes:
        num_steps: Committed train steps of the run.
        beats: The newest beat of each worker.
    """

    num_steps: int = 0
    heartbeats: Mapping[str, WorkerBeat] = field(default_factory=dict)

    def has_processed(self, worker_id: str, pid: int) -> bool:
        """Tell whether a process has finished records that no other one will be given again."""
        beat = self.heartbeats.get(worker_id)
        return (
            beat is not None
            and beat.pid == pid
            and beat.num_processed > 0
            and beat.role not in ROLES_WITHOUT_RECORDS
        )


@dataclass(frozen=True, slots=True)
class DeathCount:
    """Deaths of a worker in a row.

    Attributes:
        num_idle: Without progress of its own in between: its next start waits the longer for it.
        num_stalled: Without that, and without a committed step of the run.
        num_steps: Committed steps at the newest death.
    """

    num_idle: int = 0
    num_stalled: int = 0
    num_steps: int = 0

    def count_death(self, progress: Progress, *, worker_id: str, role: str, pid: int) -> Self:
        """Count a death.

        Args:
            progress: What was achieved by now.
            worker_id: Who died.
            role: Its role.
            pid: Of the process that died.
        """
        has_stepped = progress.num_steps > self.num_steps
        is_own = progress.has_processed(worker_id, pid) or (
            has_stepped and role in ROLES_WITHOUT_RECORDS
        )
        num_idle = 0 if is_own else self.num_idle
        num_stalled = 0 if is_own or has_stepped else self.num_stalled
        return replace(
            self, num_idle=num_idle + 1, num_stalled=num_stalled + 1, num_steps=progress.num_steps
        )

    def exceeds(self, max_restarts: int, *, is_elastic: bool) -> bool:
        """Tell whether the worker is given up. The run goes on without an elastic one, so the run's
        steps don't speak for it.
        """
        return (self.num_idle if is_elastic else self.num_stalled) > max_restarts

    @property
    def backoff_seconds(self) -> float:
        """How long the next start waits."""
        return (
            BACKOFF_SECONDS[min(self.num_idle, len(BACKOFF_SECONDS)) - 1] if self.num_idle else 0.0
        )
