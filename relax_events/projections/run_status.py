"""The status of a run: decided here, and nowhere else, from its commands and the age of its
workers' heartbeats. Lists, `relax status`, the page, alarms and `relax runs stop` all ask here.
"""

from __future__ import annotations

from enum import StrEnum

from relax_events.config import WorkersConfig
from relax_events.events.parts import WorkerState
from relax_events.events.types import WorkerHeartbeat
from relax_events.projections.run_state import RunState

MICROS = 1e6
SILENT_SECONDS, SILENT_HEARTBEATS = 30.0, 10
OVERDUE_SECONDS, OVERDUE_HEARTBEATS = 5.0, 5


class RunStatus(StrEnum):
    """What a run does. An interrupted run has not ended, and none of its workers is alive."""

    ENDED = "ended"
    RUNNING = "running"
    INTERRUPTED = "interrupted"


def compute_silence_limit(workers: WorkersConfig) -> int:
    """Return the time without a heartbeat after which a worker no longer counts as alive, in
    microseconds: much sooner than it counts as hung and is killed.
    """
    seconds = max(SILENT_SECONDS, SILENT_HEARTBEATS * workers.heartbeat_seconds)
    return int(min(workers.heartbeat_timeout_seconds, seconds) * MICROS)


def is_overdue(age_seconds: float, workers: WorkersConfig) -> bool:
    """Return whether a heartbeat is so old that its worker is shown as silent; it may be alive."""
    return age_seconds > max(OVERDUE_SECONDS, OVERDUE_HEARTBEATS * workers.heartbeat_seconds)


def find_live_workers(
    state: RunState, workers: WorkersConfig, *, now: int
) -> dict[str, WorkerHeartbeat]:
    """Return the newest heartbeat of each worker that has sent one recently and not stopped.

    Args:
        state: The folded control log; its heartbeats suffice.
        workers: The run's intervals and limits.
        now: Microseconds since the epoch.
    """
    return _find_unstopped(state, since=now - compute_silence_limit(workers))


def find_possible_writers(
    state: RunState, workers: WorkersConfig, *, now: int
) -> dict[str, WorkerHeartbeat]:
    """Return the newest heartbeat of each worker that may write again: it has not stopped, and has
    not been silent for so long that it would have been killed.

    This is not the status: a worker whose machine was suspended for a minute is not alive, and
    writes on afterwards. Who deletes a run's data asks here. Args as for `find_live_workers`.
    """
    return _find_unstopped(state, since=now - int(workers.heartbeat_timeout_seconds * MICROS))


def _find_unstopped(state: RunState, *, since: int) -> dict[str, WorkerHeartbeat]:
    """Leave out copied heartbeats: those of an imported run are of the workers of its source."""
    since = max(since, state.imported_at)
    return {
        name: heartbeat
        for name, heartbeat in state.workers.items()
        if heartbeat.sent_at > since and heartbeat.state is not WorkerState.STOPPED
    }


def decide_status(state: RunState, workers: WorkersConfig, *, now: int) -> RunStatus:
    """Return the status of a run; args as for `find_live_workers`."""
    if state.ended is not None:
        return RunStatus.ENDED
    is_running = bool(find_live_workers(state, workers, now=now))
    return RunStatus.RUNNING if is_running else RunStatus.INTERRUPTED
