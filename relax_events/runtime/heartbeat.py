"""Sends heartbeats from the work loop; they report since when it has had work without progress.

Inside a long call that the loop has declared (`activity`), a thread sends them instead, with the
call's name and deadline. Between calls that thread sends nothing, so a hung loop is detected.
Durations are measured by the monotonic clock. The times in an event are computed when it is sent,
so a step of the wall clock shifts all of them equally.
"""

from __future__ import annotations

import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

import structlog

from relax_events.errors import BrokerError
from relax_events.events.parts import WorkerState, now_micros
from relax_events.events.types import MetricsReported, WorkerHeartbeat


@dataclass(slots=True)
class Activity:
    """A long call. `started` is a time of the monotonic clock, as is `progressed`: when it last
    made progress, from which the deadline counts.
    """

    name: str
    started: float
    progressed: float
    deadline_seconds: float

    @property
    def seconds(self) -> float:
        """For how long it has run."""
        return time.monotonic() - self.started

    @property
    def deadline(self) -> float:
        """When it counts as hung, by the monotonic clock."""
        return self.progressed + self.deadline_seconds

    @property
    def is_overdue(self) -> bool:
        """Whether its deadline has passed."""
        return time.monotonic() > self.deadline


class Activities:
    """The current long calls of the work loop, outermost first. One thread enters and leaves them;
    any thread may read.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stack: list[Activity] = []

    @contextmanager
    def declare(self, name: str, *, deadline_seconds: float) -> Iterator[None]:
        """Declare a long call for the length of the block.

        Args:
            name: Readable name of the call: "publish weights".
            deadline_seconds: Time without progress after which the call counts as hung.
        """
        now = time.monotonic()
        activity = Activity(name, now, now, deadline_seconds)
        with self._lock:
            self._stack.append(activity)
        try:
            yield
        finally:
            with self._lock:
                self._stack = [other for other in self._stack if other is not activity]

    def renew(self) -> None:
        """Record progress of the innermost call: its deadline counts from now."""
        with self._lock:
            if self._stack:
                self._stack[-1].progressed = time.monotonic()

    @property
    def current(self) -> Activity | None:
        """The outermost overdue call, else the innermost call; None between calls."""
        with self._lock:
            stack = list(self._stack)
        overdue = (activity for activity in stack if activity.is_overdue)
        return next(overdue, stack[-1] if stack else None)


Send = Callable[[WorkerHeartbeat | MetricsReported], None]
REPORT_EVERY_HEARTBEATS = 5
UNLISTED_SECONDS = 0.1
"""Interval while a prompt group is in flight that no heartbeat has listed: if the host vanishes
before one does, the prompt group is leased for as long as the broker's leases last."""


class Heartbeat:
    """Call `tick` in every iteration of the work loop; it sends at most one heartbeat per interval,
    one at every change of state, and one soon after prompt groups were taken.
    """

    def __init__(self, send: Send, *, worker_id: str, role: str, interval_seconds: float) -> None:
        self._send, self._worker_id, self._role = send, worker_id, role
        self._interval = interval_seconds
        self._state = WorkerState.STARTING
        self._sending = threading.Lock()
        self._activities = Activities()
        self._last_heartbeat = self._last_regular = 0.0
        self._num_heartbeats = 0
        self.started_at = now_micros()
        self._ticked = self._progressed = self._reported_at = time.monotonic()
        self._busy_seconds = 0.0
        self._num_reported = self.num_processed = 0
        self._more: Callable[[float], Mapping[str, float]] = lambda _: {}
        self._busy_from: float | None = None
        self._mark = 0
        self.num_in_flight = 0
        self._prompt_groups_in_flight: tuple[str, ...] = ()
        self._prompt_groups_written: tuple[str, ...] = ()
        self._listed: frozenset[str] = frozenset()
        self._policy_version, self._metrics_port = -1, 0

    def set_in_flight(
        self, count: int, *, prompt_groups: Sequence[str] = (), written: Sequence[str] = ()
    ) -> None:
        """Set the work in flight that the next heartbeat reports.

        Args:
            count: Number of samples or prompt groups in flight.
            prompt_groups: Ids of the prompt groups in flight, if the role reports them.
            written: Ids of the prompt groups that the worker wrote last, newest first.
        """
        self.num_in_flight = count
        self._prompt_groups_in_flight, self._prompt_groups_written = (
            tuple(prompt_groups),
            tuple(written),
        )

    def set_policy_version(self, policy_version: int) -> None:
        """Set the version of the weights that the worker uses."""
        self._policy_version = policy_version

    def set_metrics_port(self, port: int) -> None:
        """Set the port of the worker's metrics endpoint."""
        self._metrics_port = port

    def add_metrics_source(self, source: Callable[[float], Mapping[str, float]]) -> None:
        """Report further metrics: the source is called once for each report, with the seconds since
        the report before.
        """
        self._more = source

    def record_processed(self, count: int, *, seconds: float) -> None:
        """Record finished records and the time that they took."""
        self.num_processed += count
        self._busy_seconds += seconds
        self.advance()

    def advance(self) -> None:
        """Record progress before a record is finished: tokens were sampled, or a recorded step was
        trained again.
        """
        self._ticked = self._progressed = time.monotonic()
        self._busy_from = None
        self._activities.renew()

    def advance_to(self, mark: int) -> None:
        """Set a progress counter of any kind; a changed value is progress."""
        if mark != self._mark:
            self._mark = mark
            self.advance()

    @contextmanager
    def activity(
        self, name: str, *, deadline_seconds: float, is_progress: bool = True
    ) -> Iterator[None]:
        """Declare a long call of the work loop for the duration of the block; its return is
        progress, an error is not.

        Args:
            name: Readable name of the call: "publish weights".
            deadline_seconds: Time after which the call counts as hung and the worker is restarted;
                each `advance` inside restarts the deadline.
            is_progress: Whether its return is progress; waiting for other processes is not.
        """
        with self._activities.declare(name, deadline_seconds=deadline_seconds):
            try:
                yield
            finally:
                self._ticked = time.monotonic()
        if is_progress:
            self.advance()

    @property
    def current_activity(self) -> Activity | None:
        """The current long call of the work loop."""
        return self._activities.current

    def describe_activity(self) -> str:
        """Return the current long call and its duration, readable; empty between such calls."""
        activity = self.current_activity
        return "" if activity is None else f"{activity.name} for {activity.seconds:.0f} s"

    def tick(self, state: WorkerState) -> bool:
        """Send a heartbeat if one is due; return whether it was."""
        now = self._ticked = time.monotonic()
        if self.is_starting and state is not WorkerState.STARTING:
            self.advance()  # loading the model counts as progress
        if state is WorkerState.IDLE:
            self._busy_from = None
        elif state is WorkerState.WORKING and self._busy_from is None:
            self._busy_from = now
        is_regular = now - self._last_regular >= self._interval  # early ones don't put it off
        is_early = self._has_unlisted and now - self._last_heartbeat >= UNLISTED_SECONDS
        due = is_regular or is_early
        if not due and (
            state is self._state or {state, self._state} <= {WorkerState.IDLE, WorkerState.WORKING}
        ):
            return False
        with self._sending:
            self._state = state
            self._send_heartbeat(now, state)
        if is_regular:
            self._last_regular = now
            self._num_heartbeats += 1
            if self._num_heartbeats % REPORT_EVERY_HEARTBEATS == 0:
                self._report(now)
        return True

    @property
    def _has_unlisted(self) -> bool:
        return not self._listed.issuperset(self._prompt_groups_in_flight)

    def send_inside_activity(self) -> None:
        """Send a heartbeat for the work loop if it is inside a long call and one is due; called by
        the heartbeat thread.
        """
        with self._sending:
            now = time.monotonic()
            if self.current_activity is not None and now - self._last_heartbeat >= self._interval:
                self._send_heartbeat(
                    now, WorkerState.WORKING if self._state is WorkerState.IDLE else self._state
                )

    @property
    def seconds_since_tick(self) -> float:
        """Seconds since the last tick of the work loop."""
        return time.monotonic() - self._ticked

    @property
    def seconds_without_progress(self) -> float:
        """Seconds with work but without progress; 0 inside a long call, which has its own
        deadline.
        """
        since = self._busy_from
        return (
            0.0 if since is None or self.current_activity is not None else time.monotonic() - since
        )

    @property
    def is_starting(self) -> bool:
        """Whether the work loop has not started."""
        return self._state is WorkerState.STARTING

    def _send_heartbeat(self, now: float, state: WorkerState) -> None:
        self._last_heartbeat, self._listed = now, frozenset(self._prompt_groups_in_flight)
        self._send(self._build_heartbeat(state))

    def _build_heartbeat(self, state: WorkerState) -> WorkerHeartbeat:
        now, wall, activity, busy_from = (
            time.monotonic(),
            now_micros(),
            self.current_activity,
            self._busy_from,
        )

        def at(moment: float) -> int:
            return wall - int((now - moment) * 1e6)

        return WorkerHeartbeat(
            worker_id=self._worker_id,
            role=self._role,
            host=socket.gethostname(),
            pid=os.getpid(),
            state=state,
            num_processed=self.num_processed,
            num_in_flight=self.num_in_flight,
            policy_version=self._policy_version,
            metrics_port=self._metrics_port,
            last_progress_at=at(self._progressed),
            busy_since=None if busy_from is None or activity is not None else at(busy_from),
            activity="" if activity is None else activity.name,
            activity_since=None if activity is None else at(activity.started),
            activity_deadline_at=None if activity is None else at(activity.deadline),
            prompt_groups_in_flight=list(self._prompt_groups_in_flight),
            prompt_groups_written=list(self._prompt_groups_written),
            sent_at=wall,
        )

    def _report(self, now: float) -> None:
        """Report throughput and the share of time spent working since the last report."""
        elapsed = now - self._reported_at
        values = {
            "records_per_second": (self.num_processed - self._num_reported) / elapsed,
            "busy_ratio": min(1.0, self._busy_seconds / elapsed),
            "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0,
            **self._more(elapsed),
        }
        self._num_reported, self._busy_seconds, self._reported_at = self.num_processed, 0.0, now
        self._send(
            MetricsReported(
                worker_id=self._worker_id,
                role=self._role,
                policy_version=self._policy_version,
                values=values,
            )
        )


log = structlog.get_logger()
JOIN_SECONDS = 5.0


class HeartbeatThread:
    """Sends heartbeats while the work loop is inside a long call. Use it as a context manager."""

    def __init__(self, heartbeat: Heartbeat, *, interval_seconds: float) -> None:
        self._heartbeat, self._interval = heartbeat, interval_seconds
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeats", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End the thread after the current heartbeat."""
        self._closing.set()
        self._thread.join(JOIN_SECONDS)

    def _run(self) -> None:
        while not self._closing.wait(self._interval):
            try:
                self._heartbeat.send_inside_activity()
            except BrokerError as error:  # the work loop gets the same error and handles it
                log.warning("heartbeat.send_failed", error=str(error))
