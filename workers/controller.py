"""The controller: ends the run, restarts unhealthy workers, and scales roles out and in.

It ends the run at its goal, or when the goal can't be reached. All its state is folded from the
control log, so a restarted controller reads it back.
"""

from __future__ import annotations

import dataclasses
import os
import queue
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from typing import Any

import structlog

from relax_events.config import RunConfig
from relax_events.controller.api_server import ApiServer, is_served
from relax_events.controller.autoscaler import Autoscaler
from relax_events.controller.health import HealthLimits, decide
from relax_events.controller.metrics import HealthMetrics, RunMetrics, ScaleMetrics
from relax_events.controller.retention import RetentionManager, num_versions_needed
from relax_events.controller.scaling_bounds import ScalingBounds
from relax_events.controller.scaling_service import MainThreadTask, ScalingService
from relax_events.data.rendering import read_run_template
from relax_events.deadline import Deadline
from relax_events.errors import BrokerError, ConfigError
from relax_events.events.parts import Command, now_micros
from relax_events.events.types import (
    ChangeRequested,
    Event,
    PolicyVersionPublished,
    RunCommanded,
    RunDescribed,
)
from relax_events.kafka.admin import Admin
from relax_events.kafka.inventory import count_unhealthy_partitions
from relax_events.kafka.leases import read_share_group_size
from relax_events.kafka.protocol.queue_lag import read_queue_positions
from relax_events.kafka.security.acls import build_run_prefix
from relax_events.objects.marker import claim_store, find_logged_marker, require_marker
from relax_events.ops.run_purger import Purger
from relax_events.projections.base import ProjectionGroup
from relax_events.projections.health import HealthState
from relax_events.projections.run_state import RUN_STATE_TOPICS, RunState
from relax_events.projections.scaling import ScaleState
from relax_events.roles.worker_factory import open_store, open_worker
from relax_events.runtime.control_follower import GATHER, RECENT_VERSIONS, ControlFollower
from relax_events.runtime.control_view import RESTART_CODE
from relax_events.runtime.failpoints import failpoint
from relax_events.runtime.parent_watch import SUPERVISOR_PID_VARIABLE
from relax_events.runtime.run_description import ParentRun, build_run_description, is_recorded
from relax_events.runtime.worker import Worker
from relax_events.session.resume import require_same_topics
from relax_events.topics.names import AUDIT, COMMANDS

log = structlog.get_logger()
IDLE_SECONDS = 0.5
SCRAPE_GRACE_SECONDS = 12.0  # longer than a Prometheus scrape interval, shorter than a drain
PARTITIONS_SECONDS, PARTITIONS_TIMEOUT_SECONDS = 30.0, 3.0
QUEUE_SECONDS, QUEUE_RETRY_SECONDS = (
    5.0,
    60.0,
)  # brokers before 4.2 do not support the request, and log each one


def run(config: RunConfig, *, index: int = 0) -> None:
    """Run the role until the run has ended."""
    with open_controller(config, index=index) as worker:
        ControllerLoop(worker).run()


def open_controller(config: RunConfig, *, index: int) -> Worker:
    """Return the controller's worker, which follows the control topics that health, scaling and
    purges need.
    """
    num_versions = max(RECENT_VERSIONS, num_versions_needed(config))
    return open_worker(
        "controller",
        config,
        index=index,
        follow=RUN_STATE_TOPICS,
        num_versions=num_versions,
        control_wait=GATHER,
    )


class ControllerLoop:
    """Waits for control events and API calls, and checks heartbeats every half second."""

    def __init__(self, worker: Worker) -> None:
        self._worker, self._config = worker, worker.config
        self._state = RunState()
        self._metrics = RunMetrics(self._config, self._state)
        worker.metrics.registry.register(self._metrics)
        self._look_at_queue_after = self._look_at_partitions_after = 0.0
        self._admin = Admin(
            dataclasses.replace(
                worker.connection, request_timeout_seconds=PARTITIONS_TIMEOUT_SECONDS
            )
        )
        self._inbox: queue.SimpleQueue[Event | MainThreadTask[Any] | None] = queue.SimpleQueue()
        self._limits = HealthLimits.from_config(self._config)
        self._health = HealthState.from_config(self._config, own_id=worker.worker_id)
        worker.metrics.registry.register(HealthMetrics(self._health, self._config))
        size = read_share_group_size(self._admin)
        bounds = ScalingBounds.from_config(
            self._config, is_supervised=SUPERVISOR_PID_VARIABLE in os.environ, share_group_size=size
        )
        self._scaling = ScalingService(ScaleState(), bounds, self._emit, record=self._record_change)
        self._projections = ProjectionGroup(self._state, self._health, self._scaling.state)
        self._autoscaler = Autoscaler(self._config, self._state, self._scaling)
        worker.metrics.registry.register(ScaleMetrics(self._scaling.state, bounds))
        self._purger = Purger(
            self._config,
            worker.connection,
            open_store(self._config, waits=False),
            worker.records.codec,
        )
        self._retention = RetentionManager(self._purger, self._config)
        self._all_trained_at = 0.0
        self._leader: RunState | None = None
        self._leader_follower: ControlFollower | None = None

    def run(self) -> None:
        """Work until the drain starts."""
        worker = self._worker
        worker.drain.on_start(lambda: self._inbox.put(None))
        self._describe()
        if self._config.is_replay and self._config.parent.follow:
            self._follow_leader()
        worker.control.follow(self._inbox.put, self._check_own_liveness)
        with ExitStack() as stack:
            if is_served(self._config.scaling):
                stack.enter_context(
                    closing(ApiServer(self._config, self._scaling, self._inbox.put))
                )
            while not worker.drain.requested:
                self._step()
            self._wait_for_last_scrape()
        self._purger.close()
        self._admin.close()
        if self._leader_follower is not None:
            self._leader_follower.close()

    def _step(self) -> None:
        self._take()
        self._check_completion()
        self._reconcile_workers()
        self._measure_queue()
        self._autoscaler.poll(now=now_micros(), num_unfinished=self._metrics.num_queued)
        self._scaling.reconcile()
        self._check_partitions()
        for entity, count in self._retention.purge_if_due().items():
            self._worker.metrics.count_purged(entity, count)
        self._worker.lifecycle.tick(working=False)

    def _wait_for_last_scrape(self) -> None:
        """Serve the final metrics for one more scrape: they resolve alerts, or fire one."""
        deadline = Deadline(
            SCRAPE_GRACE_SECONDS
            if self._state.ended is not None and self._config.telemetry.metrics_port
            else 0.0
        )
        while not deadline.passed:
            self._take()
            self._worker.lifecycle.tick(working=False)

    def _describe(self) -> None:
        """Write the run's description to the log, unless its newest one is the same.

        Raises:
            ConfigError: The log describes another object store, or other topics.
        """
        store, history = open_store(self._config), self._worker.control.follower.history
        descriptions = [event for event in history if isinstance(event, RunDescribed)]
        logged_marker = find_logged_marker(descriptions)
        mark = claim_store(
            store,
            run_id=self._config.run.id,
            cluster_id=self._worker.control.follower.cluster_id,
            logged_marker=logged_marker,
        )
        require_marker(mark, logged_marker=logged_marker, store_uri=store.uri(""))
        versions = [
            event.policy_version for event in history if isinstance(event, PolicyVersionPublished)
        ]
        topic_ids = self._read_topic_ids(descriptions)
        described = build_run_description(
            self._config,
            from_version=max(versions, default=None),
            store_marker=mark.value,
            chat_template=self._read_template(descriptions),
            topic_ids=topic_ids,
        )
        if not is_recorded(described, history):
            self._worker.records.producer.write([self._worker.records.build(COMMANDS, described)])

    def _read_template(self, descriptions: Sequence[RunDescribed]) -> str:
        """Return the text of the run's chat template; where this process has no such file, that of
        the log.
        """
        data, text = self._config.data, ""
        if not data.chat_template:
            return ""
        try:
            text = read_run_template(data, self._config.model.path)
        except ConfigError as error:
            log.warning("chat_template.read_failed", error=str(error))
        return text or (descriptions[-1].chat_template if descriptions else "")

    def _read_topic_ids(self, descriptions: Sequence[RunDescribed]) -> dict[str, str]:
        """Return the ids of the run's topics, once they are those that its log describes."""
        names = [spec.name for spec in self._worker.plan.specs()]
        topic_ids = self._admin.topic_ids(names)
        if descriptions:
            newest = descriptions[-1]
            require_same_topics(self._config, newest, newest.topic_ids | topic_ids)
        return topic_ids

    def _follow_leader(self) -> None:
        """Follow the run whose steps this run replays: end once it has ended and all its steps are
        trained.
        """
        source = ParentRun.read(
            self._worker.connection, self._config.parent.run, child_config=self._config
        )
        self._leader = RunState()
        self._leader_follower = ControlFollower(
            self._worker.connection, source.plan, source.codec()
        )
        self._leader_follower.start(self._leader.apply)

    def _take(self) -> None:
        try:
            item = self._inbox.get(timeout=IDLE_SECONDS)
            while True:
                if isinstance(item, MainThreadTask):
                    item.run()
                elif item is not None:
                    self._apply(item)
                    self._retention.apply(item)
                item = self._inbox.get_nowait()
        except queue.Empty:
            return

    def _check_completion(self) -> None:
        """End the run at its goal, or after too many consecutive failures."""
        run, state, num_steps = self._config.run, self._state, self._config.num_train_steps
        if state.ended is not None:
            return
        if state.num_steps >= num_steps and self._is_evaluated():
            self._stop(reason=f"all {num_steps} train steps are committed", succeeded=True)
        elif (
            self._leader is not None
            and self._leader.ended is not None
            and state.policy_version >= self._leader.policy_version
        ):
            done = f"all {state.num_steps} train steps of run {self._config.parent.run} are trained"
            self._stop(reason=f"{done}; it had ended: {self._leader.ended.reason}", succeeded=True)
        elif state.num_consecutive_failures >= run.max_failed_prompt_groups:
            failed = (
                f"{state.num_consecutive_failures} prompt groups failed in a row "
                "(run.max_failed_prompt_groups)"
            )
            self._stop(reason=f"{failed}; the last one: {state.last_failure}")
        elif state.num_consecutive_skips >= self._config.trainer.max_steps_not_finite:
            what = (
                f"{state.num_consecutive_skips} train steps in a row had a loss or gradient "
                "that is "
                "not finite (trainer.max_steps_not_finite)"
            )
            last = (
                f"the last one is {state.steps[-1].train_step}, and the weights are those before "
                "the first"
            )
            self._stop(
                reason=(
                    f"{what}; {last}; see the log of trainer-0 and "
                    "docs/how-to/alerts.md#relaxstepnotfinite"
                )
            )

    def _is_evaluated(self) -> bool:
        """Return whether the last version was evaluated on all datasets, or timed out."""
        evaluation, version = self._config.evaluation, self._config.last_version
        missing = [
            dataset.name
            for dataset in evaluation.datasets
            if (version, dataset.name) not in self._state.evaluations
        ]
        if not missing:
            return True
        self._all_trained_at = self._all_trained_at or time.monotonic()
        if time.monotonic() - self._all_trained_at < evaluation.final_seconds:
            return False
        log.warning(
            "evaluation.overdue",
            policy_version=version,
            missing=missing,
            seconds=evaluation.final_seconds,
        )
        return True

    def _apply(self, event: Event) -> None:
        self._projections.apply(event)

    def _reconcile_workers(self) -> None:
        """Restart unhealthy workers; none once the last step is trained, since the run needs no
        pipeline any more.
        """
        is_trained = self._state.num_steps >= self._config.num_train_steps
        limits = (
            dataclasses.replace(self._limits, pipeline=frozenset()) if is_trained else self._limits
        )
        self._emit(decide(self._health, limits, now=now_micros()))

    def _check_own_liveness(self, _: Event) -> None:
        """End this process when its work loop hangs: no other process watches the controller.

        Called by the thread that receives heartbeats.
        """
        if self._worker.lifecycle.liveness_problem():
            log.error("worker.killed", reason=self._worker.lifecycle.liveness_problem())
            os._exit(RESTART_CODE)

    def _measure_queue(self) -> None:
        """Measure periodically how many prompt groups wait; set no metric if the broker does not
        report the number, as before the first one is finished.
        """
        if (
            self._config.broker.prompt_queue != "share_group"
            or self._config.is_replay
            or time.monotonic() < self._look_at_queue_after
        ):
            return
        self._look_at_queue_after = time.monotonic() + QUEUE_SECONDS
        try:
            positions = read_queue_positions(
                self._worker.connection, self._worker.plan.consumer_group("rollout")
            )
            self._metrics.num_queued = (
                sum(position.num_unfinished for position in positions.values())
                if positions
                else None
            )
        except BrokerError as error:
            log.info("queue_lag.unavailable", error=str(error))
            self._metrics.num_queued = None
            self._look_at_queue_after = time.monotonic() + QUEUE_RETRY_SECONDS

    def _check_partitions(self) -> None:
        """Check the run's partitions periodically; keep the last state while the cluster does not
        report it.
        """
        if time.monotonic() < self._look_at_partitions_after:
            return
        self._look_at_partitions_after = time.monotonic() + PARTITIONS_SECONDS
        try:
            self._metrics.partitions = count_unhealthy_partitions(
                self._admin.partitions(build_run_prefix(self._config.run.id))
            )
        except BrokerError as error:
            log.info("partitions.read_failed", error=str(error))
            self._metrics.partitions = {}

    def _stop(self, *, reason: str, succeeded: bool = False) -> None:
        self._emit([RunCommanded(command=Command.STOP, reason=reason, succeeded=succeeded)])

    def _record_change(self, change: ChangeRequested) -> None:
        """Write who asked for a change. The change stands also where the log does not take the
        record, as on a broker whose ACLs are older.
        """
        log.info("change.requested", caller=change.caller, command=change.command)
        try:
            self._worker.records.producer.write([self._worker.records.build(AUDIT, change)])
        except BrokerError as error:
            log.error("change.not_recorded", error=str(error), command=change.command)

    def _emit(self, commands: Sequence[RunCommanded]) -> None:
        """Write commands, and apply them to our own state."""
        if not commands:
            return
        failpoint("controller.before_command")
        self._worker.records.producer.write(
            [self._worker.records.build(COMMANDS, event) for event in commands]
        )
        failpoint("controller.after_command")
        for event in commands:
            self._apply(event)
            addressed_to = event.worker_id or event.role or "all"
            log.info(
                "run.commanded",
                command=event.command,
                addressed_to=addressed_to,
                reason=event.reason,
                succeeded=event.succeeded,
            )
