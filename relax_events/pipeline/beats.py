"""Heartbeats, sent by the work loop itself: they tell since when it has had work and has not got on with it."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping

from relax_events.events.parts import WorkerState, now_micros
from relax_events.events.types import MetricsReported, WorkerBeat

Send = Callable[[WorkerBeat | MetricsReported], None]
REPORT_EVERY_BEATS = 5


class Beats:
    """Call `tick` from every turn of the work loop; it sends at most one beat per interval, and at every change of state."""

    def __init__(self, send: Send, *, worker_id: str, role: str, interval_seconds: float) -> None:
        self._send, self._worker_id, self._role = send, worker_id, role
        self._interval = interval_seconds
        self._state = WorkerState.STARTING
        self._last_beat = 0.0
        self._num_beats = 0
        self.started_at = self._last_progress = now_micros()
        self._busy_seconds, self._reported_at = 0.0, time.monotonic()
        self._num_reported = self.num_processed = 0
        self._more: Callable[[float], Mapping[str, float]] = lambda _: {}
        self._busy_since: int | None = None
        self._mark = 0
        self.num_in_flight = 0
        self.policy_version = -1
        self.metrics_port = 0

    def reports(self, figures: Callable[[float], Mapping[str, float]]) -> None:
        """Have further figures reported: those that this gives, once for each report, of the seconds since the one before."""
        self._more = figures

    def progress(self, count: int, *, seconds: float) -> None:
        """Note finished records and the time that they took."""
        self.num_processed += count
        self._busy_seconds += seconds
        self.advance()

    def advance(self) -> None:
        """Note that work goes on though no record is finished yet: tokens were drawn, a recorded step was trained again."""
        self._last_progress = now_micros()
        self._busy_since = None

    def advance_to(self, mark: int) -> None:
        """Note how far work has come, by a count of any kind: it goes on when that is another than before."""
        if mark != self._mark:
            self._mark = mark
            self.advance()

    def tick(self, state: WorkerState) -> bool:
        """Send a beat if one is due; return whether it was."""
        now = time.monotonic()
        if self.is_starting and state is not WorkerState.STARTING:
            self.advance()  # nobody has waited for work while it loaded its model
        if state is WorkerState.IDLE:
            self._busy_since = None
        elif state is WorkerState.WORKING and self._busy_since is None:
            self._busy_since = now_micros()
        due = now - self._last_beat >= self._interval
        if not due and (state is self._state or {state, self._state} <= {WorkerState.IDLE, WorkerState.WORKING}):
            return False
        self._last_beat, self._state = now, state
        self._send(self._beat())
        self._num_beats += 1
        if self._num_beats % REPORT_EVERY_BEATS == 0:
            self._report(now)
        return True

    @property
    def seconds_since_beat(self) -> float:
        """How long the work loop has been silent."""
        return time.monotonic() - self._last_beat

    @property
    def busy_seconds(self) -> float:
        """For how long it has had work without getting on with it."""
        since = self._busy_since
        return 0.0 if since is None else (now_micros() - since) / 1e6

    @property
    def is_starting(self) -> bool:
        """Whether the work loop has not begun."""
        return self._state is WorkerState.STARTING

    def _beat(self) -> WorkerBeat:
        return WorkerBeat(
            worker_id=self._worker_id,
            role=self._role,
            host=socket.gethostname(),
            pid=os.getpid(),
            state=self._state,
            num_processed=self.num_processed,
            num_in_flight=self.num_in_flight,
            policy_version=self.policy_version,
            metrics_port=self.metrics_port,
            last_progress_at=self._last_progress,
            busy_since=self._busy_since,
        )

    def _report(self, now: float) -> None:
        """Report throughput and the share of time spent working since the last report."""
        elapsed = now - self._reported_at
        values = {
            "records_per_second": (self.num_processed - self._num_reported) / elapsed,
            "busy_ratio": min(1.0, self._busy_seconds / elapsed),
            **self._more(elapsed),
        }
        self._num_reported, self._busy_seconds, self._reported_at = self.num_processed, 0.0, now
        self._send(MetricsReported(worker_id=self._worker_id, role=self._role, policy_version=self.policy_version, values=values))
