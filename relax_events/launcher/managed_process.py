"""A worker's process under the supervisor: to be started, running, draining, or fenced.

`DeathCount` counts deaths without progress. From them follow the delay of the next start, or the
end of the run.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

import structlog

from relax_events.events.parts import WorkerState
from relax_events.events.types import WorkerHeartbeat
from relax_events.launcher.fork_protocol import SpawnRequest
from relax_events.launcher.worker_processes import WorkerProcesses

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
        first_idle_cause: The error of the first of the deaths that `num_idle` counts.
        first_stalled_cause: Of those that `num_stalled` counts.
    """

    num_idle: int = 0
    num_stalled: int = 0
    num_steps: int = 0
    first_idle_cause: str = ""
    first_stalled_cause: str = ""

    def count_death(
        self, progress: Progress, *, worker_id: str, role: str, pid: int, cause: str = ""
    ) -> Self:
        """Return the count after another death.

        Args:
            progress: The run's progress by now.
            worker_id: The worker that died.
            role: Its role.
            pid: Of the process that died.
            cause: Its error.
        """
        has_stepped = progress.num_steps > self.num_steps
        is_own = progress.has_processed(worker_id, pid) or (
            has_stepped and role in ROLES_WITHOUT_RECORDS
        )
        num_idle = 0 if is_own else self.num_idle
        num_stalled = 0 if is_own or has_stepped else self.num_stalled
        return replace(
            self,
            num_idle=num_idle + 1,
            num_stalled=num_stalled + 1,
            num_steps=progress.num_steps,
            first_idle_cause=self.first_idle_cause if num_idle else cause,
            first_stalled_cause=self.first_stalled_cause if num_stalled else cause,
        )

    def describe_causes(self, last: str, *, is_elastic: bool) -> str:
        """Return the first cause of the counted deaths, and the last where that is another.

        Args:
            last: The error of the newest death.
            is_elastic: As for `exceeds`.
        """
        first = self.first_idle_cause if is_elastic else self.first_stalled_cause
        return last if first in ("", last) else f"first of {first}; now of {last}"

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


log = structlog.get_logger()
AFTER_GOODBYE_SECONDS = 5.0  # the same, for another instance's worker
LOG_TAIL_LINES = 12


@dataclass(frozen=True, slots=True)
class Fencing:
    """Another instance took over the work of a worker, and its process here exited."""

    pid: int
    fenced_at: int

    def is_over(
        self, heartbeat: WorkerHeartbeat | None, *, now: int, heartbeat_timeout_seconds: float
    ) -> bool:
        """Return whether the work is abandoned: the other instance sent STOPPED, or was silent for
        too long.

        Args:
            heartbeat: The newest heartbeat in the worker's name. One of this process's own worker
                is ignored: it may be newer than the other instance's.
            now: Microseconds since the epoch.
            heartbeat_timeout_seconds: Heartbeat timeout of a worker.
        """
        other = heartbeat if heartbeat is not None and heartbeat.pid != self.pid else None
        patience = (
            AFTER_GOODBYE_SECONDS
            if other is not None and other.state is WorkerState.STOPPED
            else heartbeat_timeout_seconds
        )
        heard_at = max(self.fenced_at, other.sent_at if other is not None else 0)
        return now - heard_at > patience * 1e6


@dataclass(slots=True)
class ManagedProcess:
    """A worker, whether its process runs or is to be started. A trainer of several ranks is one
    worker with a spawn request for each rank; a process may also host a worker of another role.
    """

    worker_id: str
    role: str
    requests: dict[str, SpawnRequest]
    logs: Path
    metrics_port: int = 0
    process: WorkerProcesses | None = None
    start_after: float = 0.0
    deaths: DeathCount = field(default_factory=DeathCount)
    port_deadline: float | None = None
    """Monotonic seconds until which it waits for its port to be free; None where it does not."""
    is_killed: bool = False
    fenced: Fencing | None = None
    is_elastic: bool = False
    drain_deadline: float | None = None
    abandoned_reason: str = ""
    hosted: str = ""
    """Id of the other worker in the process."""
    pids_without_goodbye: set[int] = field(default_factory=set)
    """Pids of the processes since the last one that sent STOPPED."""

    def holds(self, worker_id: str) -> bool:
        """Return whether a worker, or a rank of it, is in this process."""
        return worker_id in self.requests or worker_id == self.hosted

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the running processes by worker id."""
        pids = self.process.pids if self.process else {}
        if self.hosted and pids:
            pids[self.hosted] = pids[self.worker_id]
        return pids

    @property
    def log_path(self) -> Path:
        """The worker's log; the further ranks of a trainer have logs of their own in the same
        folder.
        """
        return self.logs / f"{self.worker_id}.log"

    @property
    def is_running(self) -> bool:
        """Whether the process runs."""
        return self.process is not None and self.process.poll() is None

    def drain_then_kill(self, *, seconds: float) -> None:
        """Signal the process to drain, once, and kill it when the drain takes longer; with 0
        seconds at once.
        """
        if self.drain_deadline is None:
            self.drain_deadline = time.monotonic() + seconds
            if self.process is not None and self.is_running and seconds:
                self.process.terminate()
        if self.process is not None and self.is_running and time.monotonic() >= self.drain_deadline:
            log.warning(
                "worker.killed",
                worker_id=self.worker_id,
                reason=f"did not drain within {seconds:g} s",
            )
            self.process.kill_group()


def read_log_tail(path: Path) -> str:
    """Return the end of a worker's log."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(lines[-LOG_TAIL_LINES:])
