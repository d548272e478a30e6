"""What every role has at hand: the connection, the plan, the codec, a producer, the control topics,
beats and the drain.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Protocol

import structlog

from relax_events.config import RunConfig
from relax_events.errors import (
    ClientFailed,
    CorruptRecord,
    Fenced,
    ForeignRecord,
    MediaError,
    ObjectError,
    PoisonSample,
    RelaxError,
    SchemaError,
    StoreUnavailable,
)
from relax_events.events.codec import UnknownFingerprint
from relax_events.events.parts import Command, Outcome, WorkerState
from relax_events.events.types import Event, MetricsReported, RunCommanded, WorkerHeartbeat
from relax_events.kafka.connection import Connection
from relax_events.kafka.producer import RecordProducer
from relax_events.kafka.records import POLICY_VERSION_HEADER, ProducerRecord, Record
from relax_events.kafka.schema_registry import open_codec
from relax_events.runtime.control_view import NO_BEGINS, RECENT_VERSIONS, ControlFollower, Listener
from relax_events.runtime.drain import Drain
from relax_events.runtime.failpoints import arm_failpoints
from relax_events.runtime.heartbeat import Beats, HeartbeatThread
from relax_events.staleness import end_of, is_expired
from relax_events.telemetry.endpoint import WorkerEndpoint
from relax_events.telemetry.logs import configure_logs
from relax_events.telemetry.metrics import WorkerMetrics
from relax_events.telemetry.traces import NO_HEADERS, open_traces
from relax_events.topics import TopicPlan
from relax_events.topics.plan import HEARTBEATS, METRICS

log = structlog.get_logger()
ANNOUNCEMENT_SECONDS = 30.0
ANSWER_SECONDS = 5.0
"""A broker that has not acknowledged a beat for so long is away."""
RESTART_CODE = 8
UNUSABLE = (CorruptRecord, SchemaError, ObjectError, PoisonSample, MediaError, ForeignRecord)
"""What makes a record a dead letter."""


class ClaimCheck(Protocol):
    """Keeps large arrays out of records: `check_in` stores them and leaves references, `check_out`
    fetches them back.
    """

    def check_in(self, event: Event, *, policy_version: int | None) -> Event:
        """Return the event with its large arrays stored, to go with the records of the version; the
        same object when there is none.
        """

    def check_out(self, event: Event) -> Event:
        """Return the event with its stored arrays fetched; the same object when there is none."""


class Outages(Protocol):
    """What waits for object stores that do not answer."""

    @property
    def seconds(self) -> float:
        """For how long one of them has not answered; 0 when all do."""

    def start_waiting(self, *, deadline_seconds: float, pause: Callable[[float], None]) -> None:
        """Wait for them from now on, with `pause` between two calls in this thread."""

    def stop_waiting(self) -> None:
        """Give up all waits."""


class Reader(Protocol):
    """Reads topics, and knows how much of them it has not read."""

    def lag(self) -> Mapping[tuple[str, int], int]:
        """Return the number of unread records by topic and partition, without asking the broker."""


class Worker(AbstractContextManager["Worker"]):
    """One process of a role. Enter it to publish our schemas, follow control and beat; leave it to
    say goodbye.
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
        linger_ms: float | None = None,
    ) -> None:
        self._claim_check = claim_check
        self.paused = False
        self._with_beats: list[Callable[[], None]] = []
        self._has_sent_letters = False
        self.role, self.config = role, config
        self.worker_id = f"{role}-{index}"
        configure_logs(config.telemetry, role=role, worker_id=self.worker_id, run_id=config.run.id)
        arm_failpoints(config.run_directory, os.environ)
        self.plan = TopicPlan.from_config(config)
        self.connection = Connection.from_config(
            config.broker, client_id=f"{config.run.id}.{self.worker_id}"
        )
        self.codec = open_codec(config.broker)
        self.metrics = WorkerMetrics(role)
        self.metrics.expect_dead_letters(error.__name__ for error in UNUSABLE)
        self.traces = open_traces(
            config, role=role, worker_id=self.worker_id, counts=self.metrics.spans
        )
        self.drain = Drain(seconds=config.workers.drain_seconds)
        self.beats = Beats(
            self._beat,
            worker_id=self.worker_id,
            role=role,
            interval_seconds=config.workers.heartbeat_seconds,
        )
        self.producer = RecordProducer(
            self.connection, linger_ms=config.broker.linger_ms if linger_ms is None else linger_ms
        )
        self.control = ControlFollower(
            self.connection, self.plan, self.codec, also=follow, num_versions=num_versions
        )
        self._heartbeats = HeartbeatThread(self.beats, interval_seconds=config.workers.heartbeat_seconds)
        self._starting = ExitStack()
        self._outages: Outages | None = None
        self._loop_thread = threading.get_ident()
        self._has_ended = threading.Event()
        self._endpoint = WorkerEndpoint(
            config.telemetry,
            self.metrics,
            illness=self.illness,
            absence=self.absence,
            activity=self.doing,
        )
        self.beats.metrics_port = self._endpoint.port

    def __enter__(self) -> Worker:
        topic, published = self.plan.topic("control.schemas"), self.codec.published_form()
        self.producer.write(
            ProducerRecord(topic, schema, key=name.hex())
            for name, schema in published.items()
            if not self.control.has_schema(name, schema)
        )
        self.beats.tick(WorkerState.STARTING)
        self._starting.enter_context(
            self.activity("start", deadline_seconds=self.config.health.start_seconds)
        )
        self._heartbeats.__enter__()
        log.info("worker.started", metrics_port=self._endpoint.port)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._starting.close()
        self._heartbeats.__exit__()
        self.control.stop()
        if kind is None or issubclass(
            kind, Fenced
        ):  # both are final; what died otherwise is missed by its silence
            self.beats.tick(WorkerState.STOPPED)
        self.close()

    def close(self) -> None:
        """Close connections and the endpoint without a word on the log: of a worker that was
        refused before it started, too.
        """
        self._has_ended.set()
        self.control.close()
        if self._outages is not None:
            self._outages.stop_waiting()
        self.producer.close()
        self.traces.close()
        self._endpoint.close()
        log.info("worker.stopped", num_processed=self.beats.num_processed)

    def follow(self, *listeners: Listener, begins: Mapping[str, int] = NO_BEGINS) -> None:
        """Start following control; a stop or drain that is meant for us starts the drain, after the
        listeners have heard of it.

        A restart ends this process at once, as a kill would: whoever started it starts it again.
        `begins` as for `ControlFollower.start`.
        """
        self.control.start(*listeners, self._obey, begins=begins)

    def wait_for_stores(self, outages: Outages, *, deadline_seconds: float) -> None:
        """Wait for object stores that do not answer, from now on, in all threads; call it from the
        thread of the work loop.
        """
        self._outages, self._loop_thread = outages, threading.get_ident()
        outages.start_waiting(deadline_seconds=deadline_seconds, pause=self._pause_for_store)

    def _pause_for_store(self, seconds: float) -> None:
        """Wait a while in the middle of some work, with heartbeats. The work is held up from
        outside, so it counts as neither hung nor stuck.

        Raises:
            StoreUnavailable: The drain's deadline has passed, or the worker ends.
        """
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if self.drain.overdue or self._has_ended.is_set():
                raise StoreUnavailable(
                    "the worker was asked to end while it waited for the object store; what "
                    "it held is delivered again"
                )
            self.beats.advance()
            if threading.get_ident() == self._loop_thread:
                self._tick_while_held_up()
            self._has_ended.wait(min(left, self.config.workers.heartbeat_seconds))

    def _tick_while_held_up(self) -> None:
        if self.beats.is_starting:
            self.beats.tick(WorkerState.STARTING)
        else:
            self.tick(working=True)

    def reads(self, reader: Reader) -> None:
        """Have the lag of the role's input told with every beat, from now on."""
        self.with_beats(lambda: self._tell_lag(reader))

    def with_beats(self, look: Callable[[], None]) -> None:
        """Have something looked at with every beat, from now on."""
        self._with_beats.append(look)

    def outbound(
        self,
        entity: str,
        event: Event,
        *,
        key: str = "",
        partition: int = -1,
        policy_version: int | None = None,
        headers: Mapping[str, str] = NO_HEADERS,
    ) -> ProducerRecord:
        """Make a record of an event for one of the run's topics. Control records hold everything:
        they must outlive the object store.

        A record whose key is a prompt group that is traced carries its trace's context.
        """
        headers = {**headers, **self.traces.get_headers(key)}
        if policy_version is not None:
            headers[POLICY_VERSION_HEADER] = str(policy_version)
        stored = (
            event
            if entity.startswith("control.")
            else self._claim_check.check_in(event, policy_version=policy_version)
        )
        return ProducerRecord(
            self.plan.topic(entity),
            self.codec.encode(stored),
            key=key,
            partition=partition,
            headers=headers,
        )

    def sample_record(
        self, entity: str, event: Event, *, prompt_group_id: str, policy_version: int
    ) -> ProducerRecord:
        """Make a record for a sample topic: the partition follows from prompt group and version,
        alike on all of them.
        """
        partition = self.plan.partition(prompt_group_id, policy_version)
        return self.outbound(
            entity, event, key=prompt_group_id, partition=partition, policy_version=policy_version
        )

    def tombstone(
        self,
        prompt_group_id: str,
        outcome: Outcome,
        reason: str,
        *,
        policy_version: int | None = None,
        mean_reward: float | None = None,
    ) -> ProducerRecord:
        """Make the record that asks the trainer to end a prompt group untrained.

        It goes into the slot of the newest version, so that the trainer surely reads it; the
        trainer decides, since only it knows whether the prompt group has been trained meanwhile.
        Only the advantage role writes it beside the samples.
        """
        version = max(self.control.policy_version, 0)
        ended = end_of(
            prompt_group_id,
            outcome,
            reason=reason,
            policy_version=version if policy_version is None else policy_version,
            trainer_version=version,
            mean_reward=mean_reward,
        )
        return self.sample_record(
            self.plan.end_requests(self.role),
            ended,
            prompt_group_id=prompt_group_id,
            policy_version=version,
        )

    def decode(self, record: Record) -> Event | None:
        """Return a record's event; what can't be decoded goes to the dead letters and gives
        None.
        """
        self.traces.add_record(record)
        if record.is_damaged:
            self.dead_letter(
                record,
                CorruptRecord(
                    "its record batch fails its checksum: bytes were altered on the broker's disk"
                ),
            )
            return None
        try:
            return self.fetched(self._decode_learning(record.value))
        except (CorruptRecord, SchemaError, ObjectError) as error:
            self.dead_letter(record, error)
            return None

    def fetched(self, event: Event) -> Event:
        """Return an event with its stored arrays fetched."""
        return self._claim_check.check_out(event)

    def _decode_learning(self, value: bytes) -> Event:
        """Decode; on a schema that is new to us, look once on control.schemas, where every writer
        publishes its own first.
        """
        try:
            return self.codec.decode(value)
        except UnknownFingerprint:
            self.control.learn_schemas()
        return self.codec.decode(value)

    def dead_letter(self, record: Record, error: RelaxError) -> None:
        """Keep a record that can't be used, untouched, with where it came from and what is wrong
        with it.
        """
        reason = type(error).__name__
        origin = {
            "origin-topic": record.topic,
            "origin-partition": str(record.partition),
            "origin-offset": str(record.offset),
        }
        headers = {
            **record.headers,
            **origin,
            "error-class": reason,
            "error-text": str(error)[:2000],
            "worker-id": self.worker_id,
        }
        self.producer.send(
            ProducerRecord(
                self.plan.topic(f"{self.role}.dead-letters"),
                record.value,
                key=record.key,
                headers=headers,
            )
        )
        self._has_sent_letters = True
        self.metrics.dead_lettered(reason)
        log.error(
            "record.dead_lettered",
            place=record.location,
            prompt_group_id=record.key,
            reason=reason,
            error=str(error),
        )

    def await_dead_letters(self) -> None:
        """Wait until the dead letters that were sent are acknowledged: only then may an offset
        behind their records be committed.

        For the trainer, whose outputs go by transactions; the other roles flush the producer of
        their outputs before they commit.

        Raises:
            BrokerError: One could not be delivered.
        """
        if self._has_sent_letters:
            self.producer.flush()
            self._has_sent_letters = False

    def await_published(self, policy_version: int) -> None:
        """Wait a moment for a version that a sample names: the sample may overtake the
        announcement, which is on another topic.

        A sample is written after its version is published, so the log tells at once whether there
        is something to wait for: records of versions that never were cost no time. That the log
        can't be asked says nothing of the sample: the worker ends, and the next one reads it again.

        Raises:
            PoisonSample: The version is not published.
            BrokerError: The log can't be asked.
            ClientFailed: The version is published, and our client of the control topics does not
                hear of it.
        """
        known = self.control.policy_version
        if not 0 <= known < policy_version:
            return
        if not self.control.is_published(policy_version):
            raise PoisonSample(
                f"the sample is of policy version {policy_version}, which was never "
                f"published; the newest is {known}"
            )
        if not self.control.wait_for_version(policy_version, timeout_seconds=ANNOUNCEMENT_SECONDS):
            what = (
                f"policy version {policy_version} is published, and the client of the control "
                "topics has not read of it"
            )
            raise ClientFailed(
                f"{what} within {ANNOUNCEMENT_SECONDS:g} s, only up to {known}; this process "
                "must start again to hear of versions"
            )

    def is_expired(self, policy_version: int | None) -> bool:
        """Tell whether a version has left the window, as far as this worker knows."""
        known = self.control.policy_version
        return policy_version is not None and is_expired(
            policy_version, trainer_version=known, max_staleness=self.config.run.max_staleness
        )

    def illness(self) -> str:
        """Say why this process should be ended and started again; empty while it should live on, as
        when the broker is away.
        """
        silent, busy, activity = (
            self.beats.seconds_since_turn,
            self.beats.busy_seconds,
            self.beats.current_activity,
        )
        if activity is not None:
            overdue = (
                f"it has been busy with one call for {activity.seconds:.0f} s, {activity.name}, "
                "whose deadline has passed"
            )
            return overdue if activity.is_overdue else ""
        if silent > self.config.workers.heartbeat_timeout_seconds and not self._is_unanswered:
            return f"its work loop has not turned for {silent:.0f} s (workers.heartbeat_timeout_seconds)"
        progress_timeout_seconds = self.config.health.progress_timeout_seconds
        return (
            f"it has not got on with its work for {busy:.0f} s (health.progress_timeout_seconds)"
            if busy > progress_timeout_seconds
            else ""
        )

    def doing(self) -> str:
        """Say what long call the work loop is inside of, and since when; empty between such
        calls.
        """
        activity = self.beats.current_activity
        return "" if activity is None else f"{activity.name} for {activity.seconds:.0f} s"

    def activity(
        self, name: str, *, deadline_seconds: float, is_progress: bool = True
    ) -> AbstractContextManager[None]:
        """Declare a long call of the work loop: heartbeats go on inside, and name it. See
        `Beats.activity`.
        """
        return self.beats.activity(name, deadline_seconds=deadline_seconds, is_progress=is_progress)

    def piece(self, name: str) -> AbstractContextManager[None]:
        """Declare the work on one piece, such as a micro-batch: it may take as long as a worker may
        go without progress.
        """
        return self.activity(name, deadline_seconds=self.config.health.progress_timeout_seconds)

    def transfer(self, name: str) -> AbstractContextManager[None]:
        """Declare the reading or writing of a whole model: a version of the weights, or a
        checkpoint.
        """
        return self.activity(name, deadline_seconds=self.config.health.transfer_seconds)

    def absence(self) -> str:
        """Say why this worker takes no work now; empty when it does."""
        reasons = {
            "the object store does not answer": self._outages is not None
            and self._outages.seconds > 0,
            "it starts": self.beats.is_starting,
            "it drains": self.drain.requested,
            "it is paused": self.paused,
            "no policy version is known yet": self.control.policy_version < 0,
            "the broker does not answer": self._is_unanswered,
        }
        return next((reason for reason, holds in reasons.items() if holds), self.illness())

    @property
    def _is_unanswered(self) -> bool:
        return self.producer.unacknowledged_seconds > ANSWER_SECONDS

    def finished(self, count: int, started: float) -> None:
        """Note a finished record batch; `started` is `time.monotonic()` at its begin."""
        seconds = time.monotonic() - started
        self.metrics.processed(count, seconds=seconds)
        self.beats.progress(count, seconds=seconds)

    def tick(self, *, working: bool) -> None:
        """Beat, from the work loop.

        Args:
            working: Whether there is work at hand that this worker can get on with now; one that
                says so for `health.progress_timeout_seconds` and finishes nothing is started again.
        Raises:
            AccessDenied: A background thread was denied what the role needs, or is let in no more.
        """
        self.connection.auth_failures.raise_fatal()
        self.metrics.policy_version(self.control.policy_version)
        self.metrics.in_flight(self.beats.num_in_flight)
        self._beat_if_due(WorkerState.WORKING if working else WorkerState.IDLE)

    def progressed(self) -> None:
        """Note, in the middle of a turn, that one more piece of the work is done; beat if a beat is
        due.
        """
        self.beats.advance()
        self._beat_if_due(WorkerState.WORKING)

    def _beat_if_due(self, state: WorkerState) -> None:
        self._starting.close()
        if self.beats.tick(WorkerState.DRAINING if self.drain.requested else state):
            for look in self._with_beats:
                look()

    def _tell_lag(self, reader: Reader) -> None:
        lag = {
            (self.plan.parse_entity(topic), partition): count
            for (topic, partition), count in reader.lag().items()
        }
        self.metrics.consumer_lag(lag, shards=self.plan.partitions_per_version)

    def _beat(self, event: WorkerHeartbeat | MetricsReported) -> None:
        topics = HEARTBEATS if isinstance(event, WorkerHeartbeat) else METRICS
        self.producer.send(self.outbound(topics[self.role], event, key=self.worker_id))

    def _obey(self, event: Event) -> None:
        if (
            not isinstance(event, RunCommanded)
            or (event.role or self.role) != self.role
            or (event.worker_id or self.worker_id) != self.worker_id
        ):
            return
        if event.command in (Command.PAUSE, Command.RESUME):
            self.paused = event.command is Command.PAUSE
        fresh = event.worker_id is None or event.commanded_at > self.beats.started_at
        if event.command is Command.RESTART and fresh:
            log.warning("worker.killed", reason=event.reason)
            os._exit(
                RESTART_CODE
            )  # our work loop has not beaten for long, so it would not drain either
        if event.command in (Command.STOP, Command.DRAIN) and fresh:
            log.info("worker.commanded", command=event.command, reason=event.reason)
            self.drain.start()
