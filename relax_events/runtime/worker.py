"""The worker that every role runs in: it connects to the broker, and holds the records in and out,
the lifecycle and the view of the control log.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import TracebackType

import structlog

from relax_events.config import RunConfig
from relax_events.errors import AccessDenied, EpisodeFailed, Fenced
from relax_events.events.codec import EventCodec
from relax_events.events.parts import WorkerState
from relax_events.events.types import MetricsReported, WorkerHeartbeat
from relax_events.kafka.connection import Connection
from relax_events.kafka.producer import LINGER_MS, RecordProducer
from relax_events.kafka.records import ProducerRecord
from relax_events.kafka.schema_registry import open_codec
from relax_events.kafka.workarounds.stale_leaders import leave_out_outdated_brokers
from relax_events.runtime.control_follower import (
    FOLLOW,
    RECENT_VERSIONS,
    ControlFollower,
    FetchWait,
)
from relax_events.runtime.control_view import ControlView
from relax_events.runtime.drain import Drain
from relax_events.runtime.failpoints import arm_failpoints
from relax_events.runtime.heartbeat import Heartbeat
from relax_events.runtime.hosting import current_host
from relax_events.runtime.lifecycle import Lifecycle
from relax_events.runtime.record_io import UNUSABLE, ClaimCheck, RecordIO
from relax_events.telemetry.endpoint import WorkerEndpoint
from relax_events.telemetry.logs import configure_logs
from relax_events.telemetry.metrics import WorkerMetrics
from relax_events.telemetry.traces import open_traces
from relax_events.topics import TopicPlan
from relax_events.topics.names import BROADCAST_ROLES, HEARTBEATS, METRICS, SCHEMAS

log = structlog.get_logger()
FOLLOW_WAIT_MS_PER_WORKER, MAX_FOLLOW_WAIT_MS = 10, 5000


def compute_follow_wait(num_workers: int) -> FetchWait:
    """Return how long the brokers hold a worker's fetch from the control log while no record comes:
    longer in a run of more than 50 workers, whose requests at rest would else grow with it.
    """
    grown_ms = min(num_workers * FOLLOW_WAIT_MS_PER_WORKER, MAX_FOLLOW_WAIT_MS)
    return FetchWait(max(FOLLOW.ms, grown_ms))


class Worker(AbstractContextManager["Worker"]):
    """One process of a role. Enter it to check that our schemas are published, and to send
    heartbeats; leave it to send the last heartbeat and close.
    """

    def __init__(
        self,
        role: str,
        config: RunConfig,
        *,
        claim_check: ClaimCheck,
        index: int = 0,
        follow: Sequence[str] = (),
        num_versions: int = RECENT_VERSIONS,
        control_wait: FetchWait | None = None,
    ) -> None:
        self.role, self.config = role, config
        self.worker_id = f"{role}-{index}"
        if current_host() is None:  # else the host has configured them, and names its threads
            configure_logs(
                config.telemetry, role=role, worker_id=self.worker_id, run_id=config.run.id
            )
        arm_failpoints(config.run_directory, os.environ)
        self.plan = TopicPlan.from_config(config)
        self.connection = leave_out_outdated_brokers(
            Connection.from_config(config.broker, client_id=f"{config.run.id}.{self.worker_id}"),
            [topic.name for topic in self.plan.specs()],
        )
        codec = open_codec(config.broker)
        self.metrics = WorkerMetrics(role)
        self.metrics.initialize_dead_letters(error.__name__ for error in (*UNUSABLE, EpisodeFailed))
        self._traces = open_traces(
            config, role=role, worker_id=self.worker_id, counts=self.metrics.spans
        )
        self.drain = Drain(seconds=config.workers.drain_seconds)
        self.heartbeat = Heartbeat(
            self._send_report,
            worker_id=self.worker_id,
            role=role,
            interval_seconds=config.workers.heartbeat_seconds,
        )
        self._producer = RecordProducer(self.connection, linger_ms=LINGER_MS)
        self.control = self._read_control_log(
            codec, follow=follow, num_versions=num_versions, wait=control_wait
        )
        codec.frame()
        self.records = RecordIO(
            role,
            self.worker_id,
            plan=self.plan,
            codec=codec,
            producer=self._producer,
            control=self.control,
            claim_check=claim_check,
            metrics=self.metrics,
            traces=self._traces,
        )
        self.lifecycle = self._build_lifecycle()
        self._endpoint = self._open_endpoint()
        self.heartbeat.set_metrics_port(self._endpoint.port)

    def _read_control_log(
        self, codec: EventCodec, *, follow: Sequence[str], num_versions: int, wait: FetchWait | None
    ) -> ControlView:
        """Read the existing versions and commands, and return the role's view of them."""
        follower = ControlFollower(
            self.connection,
            self.plan,
            codec,
            also=follow,
            reads_broadcast=self.role in BROADCAST_ROLES,
            num_versions=num_versions,
            wait=wait or compute_follow_wait(sum(self.config.roles().values())),
        )
        return ControlView(
            follower,
            self.role,
            self.worker_id,
            max_staleness=self.config.run.max_staleness,
            drain=self.drain,
            started_at=self.heartbeat.started_at,
        )

    def _build_lifecycle(self) -> Lifecycle:
        return Lifecycle(
            self.config,
            heartbeat=self.heartbeat,
            drain=self.drain,
            control=self.control,
            connection=self.connection,
            producer=self._producer,
            metrics=self.metrics,
            plan=self.plan,
        )

    def _open_endpoint(self) -> WorkerEndpoint:
        """Open the port that serves the metrics and the health checks."""
        return WorkerEndpoint(
            self.config.telemetry,
            self.metrics,
            illness=self.lifecycle.liveness_problem,
            absence=self.lifecycle.readiness_problem,
            activity=self.heartbeat.describe_activity,
        )

    def __enter__(self) -> Worker:
        self._publish_schemas()
        self.lifecycle.__enter__()
        log.info("worker.started", metrics_port=self._endpoint.port)
        return self

    def _publish_schemas(self) -> None:
        """Publish the schemas that `relax topics apply` has not published, where a worker may.

        Raises:
            AccessDenied: It may not, and some are missing.
        """
        missing = [
            ProducerRecord(self.plan.topic(SCHEMAS), schema, key=name.hex())
            for name, schema in self.records.codec.published_form().items()
            if not self.control.follower.has_schema(name, schema)
        ]
        try:
            self._producer.write(missing)
        except AccessDenied as error:
            raise AccessDenied(
                f"{len(missing)} schema(s) of this release are not on "
                f"{self.plan.topic(SCHEMAS)}, which only the operator may write; call "
                "relax topics apply with this release before its workers start"
            ) from error

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.lifecycle.__exit__(kind, error, trace)
        self.control.follower.stop()
        # these two ends are final; after others, missing heartbeats show the crash
        if kind is None or issubclass(kind, Fenced):
            self.heartbeat.tick(WorkerState.STOPPED)
        self.close()

    def close(self) -> None:
        """Close connections and the endpoint without a record on the log, also if the worker was
        refused before its start.
        """
        self.lifecycle.close()
        self.control.follower.close()
        self._producer.close()
        self._traces.close()
        self._endpoint.close()
        log.info("worker.stopped", num_processed=self.heartbeat.num_processed)

    def _send_report(self, event: WorkerHeartbeat | MetricsReported) -> None:
        topics = HEARTBEATS if isinstance(event, WorkerHeartbeat) else METRICS
        self._producer.send(self.records.build(topics[self.role], event, key=self.worker_id))
