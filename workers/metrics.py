"""The metrics role: writes every worker's metrics as JSON lines, feeds trackers, sends
notifications.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Mapping
from typing import Any

import structlog

from relax_events.config import RunConfig
from relax_events.errors import BrokerError
from relax_events.events.types import Event, MetricsReported, PolicyEvaluated, TrainStepCommitted
from relax_events.notifications.builder import NotificationBuilder
from relax_events.notifications.services import open_notifiers
from relax_events.roles.worker_factory import open_worker
from relax_events.runtime.control_follower import GATHER
from relax_events.runtime.failpoints import failpoint
from relax_events.runtime.worker import Worker
from relax_events.telemetry.delivery import DeliveryQueue
from relax_events.telemetry.endpoint import MetricsFile
from relax_events.telemetry.trackers import StepMetrics, open_tracker_queues
from relax_events.topics.names import EVALUATIONS, METRICS, TRAIN_STEPS

log = structlog.get_logger()
FOLLOWED = (*METRICS.values(), TRAIN_STEPS, EVALUATIONS)
SAVE_SECONDS = 1.0
OFFERED_SECONDS = 3600.0
"""Older metrics that a tracker did not accept are not sent again by a later process."""
IDLE_SECONDS = 0.5
CLOSE_SECONDS = 15.0
"""ClearML waits up to 12 s for its own thread; a worker has at least 20 s to drain."""


def run(config: RunConfig, *, index: int = 0) -> None:
    """Run the role until it is asked to stop."""
    with open_worker(
        "metrics", config, index=index, follow=FOLLOWED, control_wait=GATHER
    ) as worker:
        loop = MetricsLoop(worker)
        loop.run()
    if loop.has_left_feeds:
        os._exit(0)  # tracker libraries would block the exit of the process


class MetricsLoop:
    """Waits for metrics on the control log. A restarted process resumes at the position in the
    metrics file, so nothing is written twice.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._inbox: queue.SimpleQueue[tuple[Event | None, dict[str, int]]] = queue.SimpleQueue()
        self._trackers = open_tracker_queues(
            worker.config, failed=worker.metrics.deliveries.count_tracker_error
        )
        self._tellers = open_notifiers(
            worker.config, failed=worker.metrics.deliveries.count_notification_error
        )
        self._notification_builder = NotificationBuilder(
            worker.config.run.id, first_version=worker.config.first_version
        )
        self._starting_thread = threading.current_thread()
        self._saved_at = time.monotonic()

    def run(self) -> None:
        """Write until the drain starts, then write the remaining events: the run's end is reported
        too.
        """
        worker = self._worker
        worker.drain.on_start(lambda: self._inbox.put((None, {})))
        with MetricsFile(worker.config.run_directory / "metrics.jsonl") as file:
            start_offsets = dict.fromkeys(FOLLOWED, 0) | file.positions
            worker.control.follow(
                lambda event: self._receive(event, file), start_offsets=start_offsets
            )
            while True:
                try:
                    event, positions = self._inbox.get(timeout=IDLE_SECONDS)
                except queue.Empty:
                    event, positions = None, {}
                self._take(event, file)
                self._save(positions, file)
                worker.lifecycle.tick(working=event is not None)
                if event is None and worker.drain.requested:
                    break
            self._finish(file)
        self._close_feeds()

    def _finish(self, file: MetricsFile) -> None:
        """Write what was committed before the end of the run: the command that ends this worker may
        be read earlier.
        """
        self._worker.control.follower.stop()
        while not self._inbox.empty():
            self._take(self._inbox.get()[0], file)
        try:
            self._worker.control.follower.read_remaining()
        except BrokerError as error:
            log.warning("metrics.read_aborted", error=str(error))

    def _receive(self, event: Event, file: MetricsFile) -> None:
        """Write past events as they are read, so that they are not held in memory; queue newer ones
        for the loop.
        """
        if threading.current_thread() is self._starting_thread:
            self._take(event, file)
            self._worker.lifecycle.tick(working=True)
        else:
            self._inbox.put((event, self._positions()))

    def _positions(self) -> dict[str, int]:
        return {entity: self._worker.control.follower.position(entity) for entity in FOLLOWED}

    def _take(self, event: Event | None, file: MetricsFile) -> None:
        started = time.monotonic()
        self._deliver(event)
        if (line := self._line(event)) is not None:
            failpoint("metrics.before_write")
            file.write(line)
            self._worker.lifecycle.record_processed(1, started)

    def _save(self, positions: dict[str, int], file: MetricsFile) -> None:
        """Save the positions once trackers and services have accepted all earlier events, or their
        time limit has passed.
        """
        waited = time.monotonic() - self._saved_at
        if not positions or waited < SAVE_SECONDS:
            return
        if waited > OFFERED_SECONDS or all(feed.is_idle for feed in self._feeds):
            file.save(
                file.positions
                | {entity: position for entity, position in positions.items() if position}
            )
            self._saved_at = time.monotonic()

    def _deliver(self, event: Event | None) -> None:
        if (
            event is not None
            and (notification := self._notification_builder.apply(event)) is not None
        ):
            for teller in self._tellers:
                teller.put(notification)

    @property
    def has_left_feeds(self) -> bool:
        """Whether a tracker or a service did not close in time."""
        return any(feed.is_running for feed in self._feeds)

    @property
    def _feeds(self) -> list[DeliveryQueue[Any]]:
        return [*self._trackers, *self._tellers]

    def _close_feeds(self) -> None:
        """Give trackers and services a few seconds to send the rest; abandon a hanging tracker."""
        deadline = time.monotonic() + CLOSE_SECONDS
        closing = [
            threading.Thread(
                target=feed.close, kwargs={"timeout_seconds": CLOSE_SECONDS}, daemon=True
            )
            for feed in self._feeds
        ]
        for thread in closing:
            thread.start()
        for thread in closing:
            while thread.is_alive() and time.monotonic() < deadline + IDLE_SECONDS:
                thread.join(IDLE_SECONDS)
                self._worker.lifecycle.tick(working=False)

    def _track(self, series: str, step: int, at: int, values: Mapping[str, float]) -> None:
        for feed in self._trackers:
            feed.put(StepMetrics(series, step, at, values))

    def _line(self, event: Event | None) -> dict[str, Any] | None:
        if isinstance(event, TrainStepCommitted):
            self._track("train", event.train_step, event.committed_at, event.metrics)
            self._track("phase_seconds", event.train_step, event.committed_at, event.phase_seconds)
            return {
                "train_step": event.train_step,
                "at": event.committed_at,
                **event.metrics,
                "phase_seconds": event.phase_seconds,
            }
        if isinstance(event, PolicyEvaluated):
            metrics = build_evaluation_metrics(event)
            self._track(
                f"evaluation/{event.dataset}", event.policy_version, event.evaluated_at, metrics
            )
            return {
                "dataset": event.dataset,
                "at": event.evaluated_at,
                "policy_version": event.policy_version,
                **metrics,
            }
        if isinstance(event, MetricsReported):
            if (
                event.role == "critic" and "value_loss" in event.values
            ):  # the critic's metrics of the train step that made this version
                self._track("critic", event.policy_version - 1, event.reported_at, event.values)
            return {
                "worker_id": event.worker_id,
                "at": event.reported_at,
                "policy_version": event.policy_version,
                **event.values,
            }
        return None


def build_evaluation_metrics(event: PolicyEvaluated) -> dict[str, float]:
    """Return the metrics of an evaluation that are known, by name."""
    values = {
        "reward_mean": event.reward_mean,
        "reward_stderr": event.reward_stderr,
        "completion_tokens_mean": event.completion_tokens_mean,
    }
    passes = {f"pass_at_{k}": value for k, value in event.pass_at_k.items()}
    return {name: value for name, value in values.items() if value is not None} | passes
