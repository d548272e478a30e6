"""Counts a worker's deaths without progress, and derives the delay of its next start or the end of
the run. Pure values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self

from relax_events.events.types import WorkerHeartbeat

BACKOFF_SECONDS = (0.0, 2.0, 10.0, 30.0)
"""Delay before a worker is restarted, by its consecutive deaths without progress of its own."""
ROLES_WITHOUT_RECORDS = frozenset({"trainer", "critic", "controller", "metrics"})
"""Roles whose processed records are lost with the process and processed again. Only committed steps
show their progress."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of the run according to the control log.

    Attributes:
        num_steps: Committed train steps.
        heartbeats: The newest heartbeat of each worker.
    """

    num_steps: int = 0
    heartbeats: Mapping[str, WorkerHeartbeat] = field(default_factory=dict)

    def has_processed(self, worker_id: str, pid: int) -> bool:
        """Return whether a process has finished records that are not delivered again."""
        heartbeat = self.heartbeats.get(worker_id)
        return (
            heartbeat is not None
            and heartbeat.pid == pid
            and heartbeat.num_processed > 0
            and heartbeat.role not in ROLES_WITHOUT_RECORDS
        )


@dataclass(frozen=True, slots=True)
class DeathCount:
    """Consecutive deaths of a worker.

    Attributes:
        num_idle: Deaths without progress of the worker itself; they lengthen the delay of its
            restart.
        num_stalled: Deaths without that and without a committed step of the run.
        num_steps: Committed steps at the newest death.
    """

    num_idle: int = 0
    num_stalled: int = 0
    num_steps: int = 0

    def count_death(self, progress: Progress, *, worker_id: str, role: str, pid: int) -> Self:
        """Return the count after another death.

        Args:
            progress: The run's progress by now.
            worker_id: The worker that died.
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
        """Return whether the worker is abandoned. The run continues without an elastic worker, so
        committed steps are no progress of it.
        """
        return (self.num_idle if is_elastic else self.num_stalled) > max_restarts

    @property
    def backoff_seconds(self) -> float:
        """The delay of the next start."""
        return (
            BACKOFF_SECONDS[min(self.num_idle, len(BACKOFF_SECONDS)) - 1] if self.num_idle else 0.0
        )
