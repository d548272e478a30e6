"""Turns records into events and events into records, and keeps unusable records as dead letters."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TypeVar

import structlog

from relax_events.errors import (
    CorruptRecord,
    ForeignRecord,
    MediaError,
    ObjectError,
    PoisonSample,
    RelaxError,
    SchemaError,
)
from relax_events.events.codec import EventCodec, UnknownFingerprint
from relax_events.events.parts import Outcome
from relax_events.events.sample_columns import (
    MAX_ARRAY_BYTES,
    join_samples,
    split_samples,
)
from relax_events.events.types import Event, Sample
from relax_events.kafka.producer import RecordProducer
from relax_events.kafka.records import POLICY_VERSION_HEADER, ProducerRecord, Record
from relax_events.runtime.control_view import ControlView
from relax_events.staleness import build_group_end
from relax_events.telemetry.metrics import WorkerMetrics
from relax_events.telemetry.traces import NO_HEADERS, Traces
from relax_events.topics import TopicPlan
from relax_events.topics.names import DEAD_LETTERS

log = structlog.get_logger()
EventT = TypeVar("EventT", bound=Event)
NUM_AHEAD = 32
"""Records that are decoded ahead, so that their arrays are fetched."""
UNUSABLE = (CorruptRecord, SchemaError, ObjectError, PoisonSample, MediaError, ForeignRecord)
"""Errors that make a record a dead letter."""


class ArraysAhead(Protocol):
    """Fetches stored arrays in threads before they are taken."""

    def begin(self, event: Event) -> None:
        """Begin to fetch the arrays of an event, as far as there is room."""

    def check_out(self, event: Event) -> Event:
        """Return the event with its stored arrays fetched; the same event when it has none."""


class ClaimCheck(Protocol):
    """Keeps large arrays out of records: `check_in` replaces them by references, `open_ahead`
    fetches them.
    """

    @property
    def threshold_bytes(self) -> int:
        """Arrays of more bytes are stored."""

    def check_in(self, event: EventT, *, policy_version: int | None) -> EventT:
        """Return the event with its large arrays stored with the version's objects; the same event
        if it has none.
        """

    def open_ahead(self) -> AbstractContextManager[ArraysAhead]:
        """Return what fetches arrays in threads."""


class RecordIO:
    """Decodes a worker's input, encodes its output, and writes dead letters."""

    def __init__(
        self,
        role: str,
        worker_id: str,
        *,
        plan: TopicPlan,
        codec: EventCodec,
        producer: RecordProducer,
        control: ControlView,
        claim_check: ClaimCheck,
        metrics: WorkerMetrics,
        traces: Traces,
    ) -> None:
        self.codec, self.producer, self.traces = codec, producer, traces
        self._role, self._worker_id, self._plan = role, worker_id, plan
        self._control, self._claim_check, self._metrics = control, claim_check, metrics
        self._has_sent_dead_letters = False

    def build(
        self,
        entity: str,
        event: Event,
        *,
        key: str = "",
        partition: int = -1,
        policy_version: int | None = None,
        headers: Mapping[str, str] = NO_HEADERS,
    ) -> ProducerRecord:
        """Build the record of an event for one of the run's topics.

        Control records contain their arrays, because they must outlive the object store. If the key
        is a traced prompt group, the headers carry the trace context.
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
            self._plan.topic(entity),
            self.codec.encode(stored),
            key=key,
            partition=partition,
            headers=headers,
        )

    def build_for_sample(
        self, entity: str, event: Event, *, prompt_group_id: str, policy_version: int
    ) -> ProducerRecord:
        """Build a record for a sample topic: prompt group and version give the partition, the same
        on all sample topics.
        """
        partition = self._plan.partition(prompt_group_id, policy_version)
        return self.build(
            entity, event, key=prompt_group_id, partition=partition, policy_version=policy_version
        )

    def build_for_samples(self, entity: str, samples: Sequence[Sample]) -> list[ProducerRecord]:
        """Build the records of samples' events for a sample topic: one for neighbours of a prompt
        group, as far as their arrays may lie in one record.
        """
        stored = [
            self._claim_check.check_in(sample, policy_version=sample.policy_version)
            for sample in samples
        ]
        return [
            self.build_for_sample(
                entity,
                event,
                prompt_group_id=event.key.prompt_group_id,
                policy_version=event.key.policy_version,
            )
            for event in join_samples(
                stored, max_array_bytes=min(MAX_ARRAY_BYTES, self._claim_check.threshold_bytes)
            )
        ]

    def build_end_request(
        self,
        prompt_group_id: str,
        outcome: Outcome,
        reason: str,
        *,
        policy_version: int | None = None,
        mean_reward: float | None = None,
    ) -> ProducerRecord:
        """Build the record that asks the trainer to end a prompt group untrained.

        The record is written to the slot of the newest version, so that the trainer reads it. The
        trainer decides, because only it knows whether the prompt group was trained meanwhile.
        """
        version = max(self._control.policy_version, 0)
        ended = build_group_end(
            prompt_group_id,
            outcome,
            reason=reason,
            policy_version=version if policy_version is None else policy_version,
            trainer_version=version,
            mean_reward=mean_reward,
        )
        return self.build_for_sample(
            self._plan.end_requests(self._role),
            ended,
            prompt_group_id=prompt_group_id,
            policy_version=version,
        )

    def decode(self, record: Record) -> Event | None:
        """Return the event of a record on a topic without samples; a record that can't be decoded
        becomes a dead letter and gives None.
        """
        events = self.decode_samples(record)
        return events[0] if events else None

    def decode_samples(self, record: Record) -> list[Event]:
        """Return the event of each sample in a record, or its only event; a record that can't be
        decoded becomes a dead letter and gives none.
        """
        ((_, events),) = self.decode_all([record])
        return events

    def decode_all(self, records: Iterable[Record]) -> Iterator[tuple[Record, list[Event]]]:
        """Yield each record with its events, as `decode_samples`; the stored arrays of the next
        `NUM_AHEAD` records are fetched meanwhile.
        """
        waiting: deque[tuple[Record, list[Event]]] = deque()
        with self.open_ahead() as ahead:
            for record in records:
                waiting.append((record, self._begin(record, ahead)))
                if len(waiting) > NUM_AHEAD:
                    yield self._finish(*waiting.popleft(), ahead)
            while waiting:
                yield self._finish(*waiting.popleft(), ahead)

    def _begin(self, record: Record, ahead: ArraysAhead) -> list[Event]:
        self.traces.add_record(record)
        try:
            samples = split_samples(self.decode_value(record.value))
        except (CorruptRecord, SchemaError, ObjectError) as error:
            self.dead_letter(record, error)
            return []
        for sample in samples:
            ahead.begin(sample)
        return list(samples)

    def _finish(
        self, record: Record, samples: list[Event], ahead: ArraysAhead
    ) -> tuple[Record, list[Event]]:
        try:
            return record, [ahead.check_out(sample) for sample in samples]
        except (CorruptRecord, SchemaError, ObjectError) as error:
            self.dead_letter(record, error)
            return record, []

    def open_ahead(self) -> AbstractContextManager[ArraysAhead]:
        """Return what fetches stored arrays in threads."""
        return self._claim_check.open_ahead()

    def fetch_samples(self, *events: Event, ahead: ArraysAhead | None = None) -> list[Event]:
        """Return the event of each sample of decoded records, or the only event of one, with the
        stored arrays fetched, those of several at a time.

        Args:
            events: Decoded.
            ahead: What may have begun to fetch them.
        """
        samples = [sample for event in events for sample in split_samples(event)]
        with self.open_ahead() if ahead is None else nullcontext(ahead) as fetching:
            for sample in samples:
                fetching.begin(sample)
            return [fetching.check_out(sample) for sample in samples]

    def decode_value(self, value: bytes) -> Event:
        """Decode a record's value; for an unknown schema, read control.schemas once, where every
        writer publishes its schemas first.

        Raises:
            CorruptRecord: The value can't be decoded.
            SchemaError: Its schema is unknown.
        """
        try:
            return self.codec.decode(value)
        except UnknownFingerprint:
            self._control.follower.learn_schemas()
        return self.codec.decode(value)

    def dead_letter(self, record: Record, error: RelaxError) -> None:
        """Write an unusable record unchanged to the dead letters, with its origin and the error in
        the headers.
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
            "worker-id": self._worker_id,
        }
        self.producer.send(
            ProducerRecord(
                self._plan.topic(f"{self._role}{DEAD_LETTERS}"),
                record.value,
                key=record.key,
                headers=headers,
            )
        )
        self._has_sent_dead_letters = True
        self._metrics.count_dead_letter(reason)
        log.error(
            "record.dead_lettered",
            location=record.location,
            prompt_group_id=record.key,
            reason=reason,
            error=str(error),
        )

    def flush_dead_letters(self) -> None:
        """Wait until the dead letters sent so far are acknowledged: only then may an offset behind
        their records be committed.

        The trainer needs this, whose outputs are transactional, and the rollout role, which settles
        a lease when its last record is acknowledged; the other roles flush the producer of their
        outputs before they commit.

        Raises:
            BrokerError: A dead letter could not be delivered.
        """
        if self._has_sent_dead_letters:
            self.producer.flush()
            self._has_sent_dead_letters = False
