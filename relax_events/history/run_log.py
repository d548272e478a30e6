"""Reads a run's log: its control topics, and its other records only where a query needs them.

A policy version owns its slot's partitions from the start offsets in its publication up to those of
the slot's next owner. So records of a version are found without reading any others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, TypeVar

from relax_events.config import RunConfig
from relax_events.errors import CorruptRecord, SchemaError
from relax_events.events.codec import EventCodec, UnknownFingerprint, schema_marker
from relax_events.events.sample_columns import split_samples
from relax_events.events.types import Event, PolicyVersionPublished, PromptGroupEnded
from relax_events.kafka.connection import Connection
from relax_events.kafka.log_reader import LogReader
from relax_events.kafka.records import Record
from relax_events.session.broker_address import open_admin, require_run
from relax_events.topics import TopicPlan
from relax_events.topics.names import GROUP_OUTCOMES, POLICY_VERSIONS, SCHEMAS
from relax_events.topics.plan import belongs_on

TopicPartition = tuple[str, int]
OffsetRange = tuple[int, int]
EventT = TypeVar("EventT", bound=Event)
MAX_NAMED = 16
# every stream begins with a new assignment, which would wait for the last request of the one before
FETCH_WAIT_MS = 10


@dataclass(frozen=True, slots=True)
class DecodedRecord(Generic[EventT]):
    """An event and its record's position; `written_at` is the broker's time, in milliseconds since
    the epoch.
    """

    event: EventT
    position: str
    written_at: int


class Unreadable:
    """Counts unreadable records and names the first of them."""

    def __init__(self) -> None:
        self.count = 0
        self.named: list[str] = []

    def add(self, topic_partition: str, error: Exception) -> None:
        """Count a record."""
        self.count += 1
        if len(self.named) < MAX_NAMED:
            self.named.append(f"{topic_partition}: {error}")


class RunLog(AbstractContextManager["RunLog"]):
    """Reads a run's log, each partition up to its end at the first request."""

    def __init__(self, config: RunConfig, *, name: str, with_versions: bool = True) -> None:
        """Open the log, and read its schemas, versions and end offsets.

        Args:
            config: The run, with the broker's address filled in.
            name: Distinguishes clients in the broker's log.
            with_versions: Whether to read the versions, and those of a replay's parent; without
                them nothing is found by version.
        Raises:
            BrokerUnavailable: No broker answered.
            ConfigError: The broker has no topics of this run.
        """
        self.config, self.plan, self.codec = config, TopicPlan.from_config(config), EventCodec()
        self.unreadable = Unreadable()
        self._admin = open_admin(config, name=name)
        self.topics = frozenset(self._admin.topics(self.plan.topic("")))
        require_run(config, self.topics)
        self.connection = Connection.from_config(config.broker, client_id=f"{config.run.id}.{name}")
        self._readers: list[LogReader] = []
        self._idle: list[LogReader] = []
        self._seen_ends: dict[TopicPartition, int] = {}
        self._unknown_schemas: set[bytes] = set()
        self._learn_schemas(config.run.id)
        self.versions = self._read_versions(config.run.id) if with_versions else {}
        self._owning_versions = self.versions
        if (
            with_versions and self.plan.source_run_id
        ):  # a replay's samples are another run's, at the offsets of that run's versions
            self._learn_schemas(self.plan.source_run_id)
            self._owning_versions = self._read_versions(self.plan.source_run_id)
        self._outcomes: dict[str, DecodedRecord[PromptGroupEnded]] | None = None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for reader in self._readers:
            reader.close()
        self._admin.close()

    @property
    def newest_version(self) -> int:
        """The newest published version, -1 before the first."""
        return max(self.versions, default=-1)

    @property
    def outcomes(self) -> Mapping[str, DecodedRecord[PromptGroupEnded]]:
        """The outcome of each prompt group, by id."""
        if self._outcomes is None:
            self._outcomes = {}
            for record in self.read_control(GROUP_OUTCOMES, PromptGroupEnded):
                self._outcomes.setdefault(record.event.prompt_group_id, record)
        return self._outcomes

    def read_control(self, entity: str, kind: type[EventT]) -> Iterator[DecodedRecord[EventT]]:
        """Read the events of a control topic, in log order."""
        yield from self.read(self.full_ranges(entity, range(1)), kind)

    def read_control_events(self, *entities: str) -> Iterator[Event]:
        """Read the events of these control topics of the run, one topic after the other.

        Publications come in the order of their versions, as they were read at the start.
        """
        for entity in filter(self.plan.has, entities):
            if entity == POLICY_VERSIONS:
                yield from (self.versions[version].event for version in sorted(self.versions))
            else:
                for record in self.records(self._control_spans(self.plan.run_id, entity)):
                    yield from (
                        event for event in self.decode_samples(record) if belongs_on(entity, event)
                    )

    def full_ranges(
        self, entity: str, partitions: Iterable[int]
    ) -> dict[TopicPartition, OffsetRange]:
        """Return the offset ranges of all records in these partitions of a topic; they start at 0,
        or at the oldest available record.
        """
        topic = self.plan.topic(entity)
        return {
            topic_partition: (0, end)
            for topic_partition, end in self._end_offsets(
                (topic, partition) for partition in partitions
            ).items()
        }

    def offset_ranges(
        self, entity: str, versions: range, *, shard: int | None = None
    ) -> dict[TopicPartition, OffsetRange]:
        """Return the offset ranges of the records of these versions on a sample topic.

        A record that was written for a version after its slot was reused is among the next
        owner's records, and is not found.

        Args:
            entity: A sample topic, for example `rollout.samples`.
            versions: Policy versions; those that were never published are left out.
            shard: Take only this shard's partitions.
        """
        topic = self.plan.topic(entity)
        owners = {
            topic_partition: ends
            for topic_partition, ends in self._owners(versions).items()
            if shard is None or topic_partition % self.plan.partitions_per_version == shard
        }
        successors = {
            partition: last + self.plan.num_slots for partition, (_, last) in owners.items()
        }
        ends = self._end_offsets(
            (topic, partition)
            for partition, successor in successors.items()
            if successor not in self._owning_versions
        )
        spans = {}
        for partition, (first, _) in sorted(owners.items()):
            topic_partition = (topic, partition)
            stop = (
                ends[topic_partition]
                if topic_partition in ends
                else self._start_offset(topic, partition, successors[partition])
            )
            spans[topic_partition] = (self._start_offset(topic, partition, first), stop)
        return spans

    def _owners(self, versions: range) -> dict[int, tuple[int, int]]:
        """Return the first and the last of the versions that owned each partition."""
        owners: dict[int, tuple[int, int]] = {}
        for version in versions:
            if version in self._owning_versions:
                for partition in self.plan.partitions_of_version(version):
                    owners[partition] = (owners.get(partition, (version, version))[0], version)
        return owners

    def _start_offset(self, topic: str, partition: int, version: int) -> int:
        place = (
            self.plan.parse_entity(topic),
            partition,
        )  # a run that was imported under another id keeps the offsets, not the topic names
        events = [
            versions[version].event
            for versions in (self.versions, self._owning_versions)
            if version in versions
        ]  # a replay may start later
        offsets = (topic_partition for event in events for topic_partition in event.start_offsets)
        return next(
            (
                topic_partition.offset
                for topic_partition in offsets
                if (self.plan.parse_entity(topic_partition.topic), topic_partition.partition)
                == place
            ),
            0,
        )

    def _end_offsets(self, topic_partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """Return the end offsets of partitions at their first request."""
        partitions = list(topic_partitions)
        self._seen_ends |= self._admin.end_offsets(
            [
                topic_partition
                for topic_partition in partitions
                if topic_partition not in self._seen_ends
            ]
        )
        return {topic_partition: self._seen_ends[topic_partition] for topic_partition in partitions}

    def watermarks(self, topic: str, partition: int) -> OffsetRange:
        """Return the oldest and the next offset of a partition, as the broker knows them now."""
        with self._reader() as reader:
            return reader.watermarks(topic, partition)

    def records(self, spans: Mapping[TopicPartition, OffsetRange]) -> Iterator[Record]:
        """Read the records of these ranges, in order per partition, as `LogReader.stream` does."""
        with self._reader() as reader:
            yield from reader.stream(spans)

    @contextmanager
    def _reader(self) -> Iterator[LogReader]:
        """Lend a reader: a stream that starts while another is open needs one of its own."""
        if not self._idle:
            self._readers.append(LogReader(self.connection, fetch_wait_ms=FETCH_WAIT_MS))
            self._idle.append(self._readers[-1])
        reader = self._idle.pop()
        try:
            yield reader
        finally:
            self._idle.append(reader)

    def read(
        self, spans: Mapping[TopicPartition, OffsetRange], kind: type[EventT]
    ) -> Iterator[DecodedRecord[EventT]]:
        """Read the events of a kind in these ranges; undecodable records are counted as
        unreadable. The event of a prompt group is read as those of its samples.
        """
        for record in self.records(spans):
            for event in self.decode_samples(record):
                if isinstance(event, kind) and belongs_on(
                    self.plan.parse_entity(record.topic), event
                ):
                    yield DecodedRecord(event, record.location, record.timestamp_ms)

    def read_at(
        self, entity: str, topic_partitions: Iterable[tuple[int, int]], kind: type[EventT]
    ) -> list[DecodedRecord[EventT]]:
        """Return the events of a kind at these (partition, offset) positions of a topic, in the
        order of the positions; those of all samples of a record.

        Raises:
            BrokerError: A record was purged or never written.
        """
        positions = list(topic_partitions)
        with self._reader() as reader:
            records = reader.read_at(self.plan.topic(entity), positions)
        events = (
            (records[topic_partition], event)
            for topic_partition in dict.fromkeys(positions)
            for event in self.decode_samples(records[topic_partition])
        )
        return [
            DecodedRecord(event, record.location, record.timestamp_ms)
            for record, event in events
            if isinstance(event, kind)
        ]

    def read_records_at(
        self, topic: str, topic_partitions: Iterable[tuple[int, int]]
    ) -> dict[tuple[int, int], Record]:
        """Return the records at these (partition, offset) positions of a topic, given by its full
        name; raises as `read_at`.
        """
        with self._reader() as reader:
            return reader.read_at(topic, set(topic_partitions))

    def decode_samples(self, record: Record) -> Sequence[Event]:
        """Return the event of each sample in a record, or its only event; none for an undecodable
        record, which is counted and named.

        A writer that started later publishes its schemas before its first record, and topics have
        no order among each other: for an unknown schema, control.schemas is read again.
        """
        try:
            try:
                return split_samples(self.codec.decode(record.value))
            except UnknownFingerprint:
                if not self._learn_newer_schemas(record):
                    raise
            return split_samples(self.codec.decode(record.value))
        except (CorruptRecord, SchemaError) as error:
            self.unreadable.add(record.location, error)
            return ()

    def _learn_newer_schemas(self, record: Record) -> bool:
        """Read the schemas again, once for each schema that stays unknown; return whether they were
        read.
        """
        marker = schema_marker(record.value)
        if marker in self._unknown_schemas:
            return False
        self._unknown_schemas.add(marker)
        self._seen_ends.pop((self.plan.topic(SCHEMAS), 0), None)
        self._learn_schemas(self.config.run.id)
        return True

    def follow(
        self, starts: Mapping[TopicPartition, int], *, turn_seconds: float = 0.5
    ) -> Iterator[Record | None]:
        """Read records as they come, forever; yield None when nothing came for a while, so that the
        caller can check the time.
        """
        with self._reader() as reader:
            reader.assign(starts)
            while True:
                yield from reader.fetch(timeout_seconds=turn_seconds) or (None,)

    def _read_versions(self, run_id: str) -> dict[int, DecodedRecord[PolicyVersionPublished]]:
        spans = self._control_spans(run_id, POLICY_VERSIONS)
        return {
            record.event.policy_version: record
            for record in self.read(spans, PolicyVersionPublished)
        }

    def _control_spans(self, run_id: str, entity: str) -> dict[TopicPartition, OffsetRange]:
        return {
            topic_partition: (0, end)
            for topic_partition, end in self._end_offsets(
                [(self.plan.build_topic_name(run_id, entity), 0)]
            ).items()
        }

    def _learn_schemas(self, run_id: str) -> None:
        for record in self.records(self._control_spans(run_id, SCHEMAS)):
            self.learn_schema(record)

    def learn_schema(self, record: Record) -> None:
        """Learn the schema in a record of control.schemas."""
        if record.value:
            try:
                self.codec.learn(record.value, key=record.key)
            except SchemaError as error:
                self.unreadable.add(record.location, error)
