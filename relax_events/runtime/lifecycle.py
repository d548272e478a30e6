"""A worker's lifecycle: start, ticks of its work loop, long calls, liveness, readiness and end."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Protocol, Self

from relax_events.config import RunConfig
from relax_events.errors import StoreUnavailable
from relax_events.events.parts import WorkerState
from relax_events.kafka.connection import Connection
from relax_events.kafka.producer import RecordProducer
from relax_events.runtime.control_view import ControlView
from relax_events.runtime.drain import Drain
from relax_events.runtime.heartbeat import Heartbeat, HeartbeatThread
from relax_events.telemetry.metrics import WorkerMetrics
from relax_events.topics import TopicPlan

PROGRESS_SECONDS = 0.01
ACKNOWLEDGEMENT_SECONDS = 5.0
"""Seconds without an acknowledgement after which the broker counts as unavailable."""


class Outages(Protocol):
    """Waits for object stores that do not answer."""

    @property
    def seconds(self) -> float:
        """Seconds for which one of them has not answered; 0 when all answer."""

    def start_waiting(self, *, deadline_seconds: float, pause: Callable[[float], None]) -> None:
        """Start to retry failed calls to stores, with `pause` between two calls in this thread."""

    def stop_waiting(self) -> None:
        """Give up all waits."""


class LagSource(Protocol):
    """A reader of topics that knows how many records it has not read."""

    def lag(self) -> Mapping[tuple[str, int], int]:
        """Return the number of unread records by topic and partition, without asking the broker."""


class Lifecycle(AbstractContextManager["Lifecycle"]):
    """Sends the worker's heartbeats and checks its health. Enter it to start the heartbeats; the
    first `tick` ends the start-up.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        heartbeat: Heartbeat,
        drain: Drain,
        control: ControlView,
        connection: Connection,
        producer: RecordProducer,
        metrics: WorkerMetrics,
        plan: TopicPlan,
    ) -> None:
        self._config, self._heartbeat, self._drain = config, heartbeat, drain
        self._control, self._connection, self._producer = control, connection, producer
        self._metrics, self._plan = metrics, plan
        self._on_heartbeat: list[Callable[[], None]] = []
        self._thread = HeartbeatThread(heartbeat, interval_seconds=config.workers.heartbeat_seconds)
        self._starting = ExitStack()
        self._outages: Outages | None = None
        self._loop_thread = threading.get_ident()
        self._has_ended = threading.Event()
        self._recorded_at = -math.inf

    def __enter__(self) -> Self:
        self._heartbeat.tick(WorkerState.STARTING)
        self._starting.enter_context(
            self.activity("start", deadline_seconds=self._config.health.start_seconds)
        )
        self._thread.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the heartbeats of long calls."""
        self._starting.close()
        self._thread.__exit__()

    def close(self) -> None:
        """End all waits for object stores."""
        self._has_ended.set()
        if self._outages is not None:
            self._outages.stop_waiting()

    def tick(self, *, working: bool) -> None:
        """Send a heartbeat from the work loop, if one is due.

        Args:
            working: Whether the worker has work that it can do now. A worker that works for
                `health.progress_timeout_seconds` without finishing anything is restarted.
        Raises:
            AccessDenied: A background thread was denied what the role needs, or can no longer log
                in.
        """
        self._connection.auth_failures.raise_fatal()
        self._metrics.set_policy_version(self._control.policy_version)
        self._metrics.set_in_flight(self._heartbeat.num_in_flight)
        self._send_if_due(WorkerState.WORKING if working else WorkerState.IDLE)

    def record_progress(self) -> None:
        """Record progress in the middle of an iteration; send a heartbeat if one is due.

        Called for each record, it does so at most every `PROGRESS_SECONDS`.
        """
        now = time.monotonic()
        if now - self._recorded_at < PROGRESS_SECONDS:
            return
        self._recorded_at = now
        self._heartbeat.advance()
        self._send_if_due(WorkerState.WORKING)

    def record_processed(self, count: int, started: float) -> None:
        """Record a finished record batch; `started` is the monotonic time of its start."""
        seconds = time.monotonic() - started
        self._metrics.count_processed(count, seconds=seconds)
        self._heartbeat.record_processed(count, seconds=seconds)

    def activity(
        self, name: str, *, deadline_seconds: float, is_progress: bool = True
    ) -> AbstractContextManager[None]:
        """Declare a long call of the work loop: heartbeats continue and name it. See
        `Heartbeat.activity`.
        """
        return self._heartbeat.activity(
            name, deadline_seconds=deadline_seconds, is_progress=is_progress
        )

    def piece(self, name: str) -> AbstractContextManager[None]:
        """Declare one unit of work, such as a micro-batch; its deadline is
        `health.progress_timeout_seconds`.
        """
        return self.activity(name, deadline_seconds=self._config.health.progress_timeout_seconds)

    def transfer(self, name: str) -> AbstractContextManager[None]:
        """Declare the transfer of a whole model: a version of the weights, or a checkpoint."""
        return self.activity(name, deadline_seconds=self._config.health.start_seconds)

    def track_lag(self, source: LagSource) -> None:
        """Report the lag of the role's input with every heartbeat, from now on."""

        def report() -> None:
            lag = {
                (self._plan.parse_entity(topic), partition): count
                for (topic, partition), count in source.lag().items()
            }
            self._metrics.consumer_lag.set(lag, shards=self._plan.partitions_per_version)

        self.on_heartbeat(report)

    def on_heartbeat(self, call: Callable[[], None]) -> None:
        """Call a function with every heartbeat of the work loop, from now on."""
        self._on_heartbeat.append(call)

    def wait_for_stores(self, outages: Outages, *, deadline_seconds: float) -> None:
        """Let all threads wait for unavailable object stores, from now on; call it from the work
        loop.
        """
        self._outages, self._loop_thread = outages, threading.get_ident()
        outages.start_waiting(deadline_seconds=deadline_seconds, pause=self._pause_for_store)

    def liveness_problem(self) -> str:
        """Return why this process should be restarted; empty if it should not, also while the
        broker is unavailable.
        """
        heartbeat = self._heartbeat
        activity = heartbeat.current_activity
        if activity is not None:
            overdue = (
                f"it has been in one call for {activity.seconds:.0f} s, {activity.name}, "
                "whose deadline has passed"
            )
            return overdue if activity.is_overdue else ""
        silent, busy = heartbeat.seconds_since_tick, heartbeat.seconds_without_progress
        if silent > self._config.workers.heartbeat_timeout_seconds and not self.is_broker_away:
            return (
                f"its work loop has not ticked for {silent:.0f} s "
                "(workers.heartbeat_timeout_seconds)"
            )
        if busy > self._config.health.progress_timeout_seconds:
            return (
                f"it has made no progress with its work for {busy:.0f} s "
                "(health.progress_timeout_seconds)"
            )
        return ""

    def readiness_problem(self) -> str:
        """Return why this worker takes no work now; empty when it does."""
        reasons = {
            "the object store does not answer": self._outages is not None
            and self._outages.seconds > 0,
            "it starts": self._heartbeat.is_starting,
            "it drains": self._drain.requested,
            "it is paused": self._control.is_paused,
            "no policy version is known yet": self._control.policy_version < 0,
            "the broker does not answer": self.is_broker_away,
        }
        return next((reason for reason, holds in reasons.items() if holds), self.liveness_problem())

    @property
    def is_broker_away(self) -> bool:
        """Whether the broker has not acknowledged a record for a while."""
        return self._producer.unacknowledged_seconds > ACKNOWLEDGEMENT_SECONDS

    def _send_if_due(self, state: WorkerState) -> None:
        self._starting.close()
        if self._heartbeat.tick(WorkerState.DRAINING if self._drain.requested else state):
            for call in self._on_heartbeat:
                call()

    def _pause_for_store(self, seconds: float) -> None:
        """Wait for an object store, with heartbeats; meanwhile the worker counts as neither hung
        nor without progress.

        Raises:
            StoreUnavailable: The drain's deadline has passed, or the worker ends.
        """
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if self._drain.deadline_passed or self._has_ended.is_set():
                raise StoreUnavailable(
                    "the worker was asked to stop while it waited for the object store; its "
                    "records are delivered again"
                )
            self._heartbeat.advance()
            if threading.get_ident() == self._loop_thread:
                self._tick_while_waiting()
            self._has_ended.wait(min(left, self._config.workers.heartbeat_seconds))

    def _tick_while_waiting(self) -> None:
        if self._heartbeat.is_starting:
            self._heartbeat.tick(WorkerState.STARTING)
        else:
            self.tick(working=True)
