"""A worker's process under the supervisor: running or to be started, draining, or fenced."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from relax_events.events.parts import WorkerState
from relax_events.events.types import WorkerHeartbeat
from relax_events.launcher.deaths import DeathCount
from relax_events.launcher.fork_protocol import SpawnRequest
from relax_events.launcher.worker_processes import WorkerProcesses

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
    worker with a spawn request for each rank.
    """

    worker_id: str
    role: str
    requests: dict[str, SpawnRequest]
    logs: Path
    metrics_port: int = 0
    process: WorkerProcesses | None = None
    start_after: float = 0.0
    deaths: DeathCount = field(default_factory=DeathCount)
    is_killed: bool = False
    fenced: Fencing | None = None
    is_elastic: bool = False
    drain_deadline: float | None = None
    abandoned_reason: str = ""
    pids_without_goodbye: set[int] = field(default_factory=set)
    """Pids of the processes since the last one that sent STOPPED."""

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
