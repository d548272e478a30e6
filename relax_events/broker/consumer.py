"""Reads records: as a member of a consumer group, or as a reader that chooses its partitions and positions itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import structlog
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, TopicPartition

from relax_events.broker.connection import Connection, error_of, translate
from relax_events.broker.deadline import Deadline
from relax_events.broker.records import Record, logged
from relax_events.errors import AccessDenied, BrokerError, BrokerUnavailable
from relax_events.events.container import LoggedRecord
from relax_events.events.types import TopicOffset

log = structlog.get_logger()

READER_SETTINGS: dict[str, Any] = {
    "enable_auto_commit": False,
    "enable_auto_offset_store": False,
    "isolation_level": "read_committed",
    "check_crcs": True,
    "auto_offset_reset": "error",
    "fetch_wait_max_ms": 100,
    "fetch_message_max_bytes": 16 * 1024 * 1024,
    "queued_max_messages_kbytes": 65_536,
    "fetch_queue_backoff_ms": 20,  # 1000 by default: that long nothing came after 64 MiB or 100,000 records lay fetched ahead, after a seek too
}
LEADER_CHANGE_SECONDS = 0.05
STREAMED_AT_ONCE = 500
ARRIVAL_SECONDS = 0.05
HAND_OVER_SECONDS = 2.5  # of one request, and of all work in a revoke callback: sessions last 3 s at the least
BEHIND = {KafkaError._UNKNOWN_PARTITION, KafkaError._UNKNOWN_TOPIC, KafkaError._DESTROY_BROKER}
TRANSIENT = {KafkaError._ALL_BROKERS_DOWN, KafkaError._TRANSPORT, KafkaError._TIMED_OUT, KafkaError._MAX_POLL_EXCEEDED}

Place = tuple[str, int]


class Fetching:
    """What both kinds of readers share: waiting for records without spinning, and meeting a log that was cut off."""

    def __init__(self, consumer: Any, connection: Connection) -> None:
        self._consumer = consumer
        self._connection = connection
        self._timeout_seconds = connection.request_timeout_seconds
        self._ask_seconds = min(HAND_OVER_SECONDS, self._timeout_seconds)

    def fetch(self, max_records: int = 500, *, timeout_seconds: float) -> list[Record]:
        """Return records as soon as there is one, with all that lie behind it up to `max_records`; [] at the timeout.

        Raises:
            BrokerRefused: The broker has not let us in for as long as a request may take, or denies us what we read.
        """
        first = self._consumer.poll(timeout_seconds)
        if first is None:
            if self._connection.refusals.seconds > self._timeout_seconds:
                self._ask_whether_refused()
            return []
        messages = [first, *self._consumer.consume(max_records - 1, 0)] if max_records > 1 else [first]
        return [Record.of(message) for message in messages if self._is_record(message)]

    def _ask_whether_refused(self) -> None:
        """Tell an idle log from one that we are kept away from; where some broker still answers, we are not."""
        try:
            self._consumer.list_topics(timeout=self._ask_seconds)
        except KafkaException as exception:
            raise self._connection.translate(error_of(exception), "reading the log") from exception
        self._connection.refusals.forget()

    def _is_record(self, message: Any) -> bool:
        error = message.error()
        if error is None:
            return True
        if error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
            self._meet_cut_log(message.topic(), message.partition())
        elif error.code() in TRANSIENT or error.retriable():
            log.debug("fetch.disturbed", error=error.name())
        elif error.code() != KafkaError._PARTITION_EOF:
            raise translate(error, f"reading {message.topic() or 'the log'}")
        return False

    def _meet_cut_log(self, topic: str, partition: int) -> None:
        """Go on at the oldest record that is left, after a purge below our position; the gap is said aloud."""
        low, _ = self.watermarks(topic, partition)
        log.warning("log.truncated", topic=topic, partition=partition, resumed_at=low)
        self._restart(topic, partition, low)

    def _restart(self, topic: str, partition: int, offset: int) -> None:
        """Go on at `offset` where reading has stopped with an error; such a partition can't be sought."""
        place = TopicPartition(topic, partition, offset)
        try:
            self._consumer.incremental_unassign([place])
            self._consumer.incremental_assign([place])
        except KafkaException as exception:
            raise translate(error_of(exception), f"reading on at {topic}[{partition}]@{offset}") from exception

    def watermarks(self, topic: str, partition: int) -> tuple[int, int]:
        """Return the oldest and the next offset of a partition, asked from the broker.

        A partition that was just made, or whose leader is changing, is asked again until the request timeout.
        """
        deadline = Deadline(self._timeout_seconds)
        while True:
            try:
                low, high = self._consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=self._timeout_seconds)
            except KafkaException as exception:
                is_shown = self._is_shown(topic, partition)  # then the client's own view is behind
                error = self._connection.translate(error_of(exception), f"asking for the ends of {topic}[{partition}]")
                is_transient = isinstance(error, BrokerUnavailable) or (is_shown and error_of(exception).code() in BEHIND)
                if not is_transient or deadline.passed:
                    raise error from exception
                time.sleep(LEADER_CHANGE_SECONDS)
            else:
                return low, high

    def _is_shown(self, topic: str, partition: int = 0) -> bool:
        """Ask for a topic by name and return whether the broker has that partition; a broker that is away shows nothing.

        Raises:
            AccessDenied: The topic is hidden from us.
        """
        try:
            found = self._consumer.list_topics(topic, timeout=self._ask_seconds).topics[topic]
        except KafkaException:
            return False
        if found.error is not None and isinstance(denied := translate(found.error, f"reading {topic}"), AccessDenied):
            raise denied
        return partition in found.partitions

    def seek(self, topic: str, partition: int, offset: int) -> None:
        """Go on reading a partition from `offset`."""
        try:
            self._consumer.seek(TopicPartition(topic, partition, offset))
        except KafkaException as exception:
            raise translate(error_of(exception), f"seeking {topic}[{partition}]@{offset}") from exception

    def group_metadata(self) -> Any:
        """Return what a transaction needs to commit this reader's offsets."""
        return self._consumer.consumer_group_metadata()

    def close(self) -> None:
        """Leave the group and the broker."""
        self._consumer.close()


OnRevoked = Callable[[list[TopicOffset], Deadline], None]


class GroupConsumer(Fetching):
    """A member of a consumer group (KIP-848, range assignor: the same partitions of all its topics).

    Where the group has no committed offset it starts at the oldest record. Partitions are given back only inside
    `fetch`; `on_revoked` is called first, with the partitions that go and the one deadline that all hand-over work shares:
    it lies well within the session timeout, after which the broker would take the partitions anyhow.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        consumer_group: str,
        topics: Sequence[str],
        on_assigned: Callable[[list[TopicOffset]], None] = lambda _: None,
        on_revoked: OnRevoked = lambda _offsets, _deadline: None,
    ) -> None:
        settings = connection.settings(
            group_id=consumer_group,
            group_protocol="consumer",
            group_remote_assignor="range",
            socket_timeout_ms=int(HAND_OVER_SECONDS * 1000),
            on_commit=_report_commit,
            **READER_SETTINGS,
        )
        super().__init__(Consumer(settings), connection)
        self._on_assigned, self._on_revoked = on_assigned, on_revoked
        self._is_leaving = False
        self.positions: dict[tuple[str, int], int] = {}
        self._consumer.subscribe(list(topics), on_assign=self._assign, on_revoke=self._revoke, on_lost=self._lose)

    def fetch(self, max_records: int = 500, *, timeout_seconds: float) -> list[Record]:
        """See `Fetching.fetch`; also takes part in rebalances."""
        records = super().fetch(max_records, timeout_seconds=timeout_seconds)
        held = [record for record in records if (record.topic, record.partition) in self.positions]
        for record in held:
            self.positions[record.topic, record.partition] = record.offset + 1
        return held

    def commit(self, offsets: Iterable[TopicOffset], *, wait: Deadline | None = None) -> None:
        """Commit next positions. A lost commit means redelivery, which ids make harmless; so without `wait` nobody waits.

        With a deadline that has passed nothing is committed. One commit is bounded by the client's request timeout, which for
        group members is as short as the hand-over's deadline.
        """
        partitions = [TopicPartition(offset.topic, offset.partition, offset.offset) for offset in offsets]
        if not partitions:
            return
        if wait is not None and wait.passed:
            log.warning("offset_commit.overdue", num_partitions=len(partitions))
            return
        try:
            self._consumer.commit(offsets=partitions, asynchronous=wait is None)
        except KafkaException as exception:
            log.warning("offset_commit.refused", error=error_of(exception).name())

    def pause(self) -> None:
        """Keep the membership, take no records."""
        self._consumer.pause(self._consumer.assignment())

    def resume(self) -> None:
        """Take records again."""
        self._consumer.resume(self._consumer.assignment())

    def seek(self, topic: str, partition: int, offset: int) -> None:
        """See `Fetching.seek`."""
        super().seek(topic, partition, offset)
        self.positions[topic, partition] = offset

    def close(self) -> None:
        """Leave the group and the broker."""
        self._is_leaving = True
        super().close()

    def _assign(self, consumer: Any, partitions: list[TopicPartition]) -> None:
        if self._is_leaving:
            return  # they go at once, and a member that leaves is not told where to begin
        committed = self._committed(consumer, partitions)
        for partition in committed:
            partition.offset = partition.offset if partition.offset >= 0 else OFFSET_BEGINNING
            self.positions[partition.topic, partition.partition] = max(partition.offset, 0)
        consumer.incremental_assign(committed)
        consumer.resume(committed)  # one that was taken away while paused comes back paused
        self._on_assigned([TopicOffset(p.topic, p.partition, max(p.offset, 0)) for p in committed])

    def _committed(self, consumer: Any, partitions: list[TopicPartition]) -> list[TopicPartition]:
        """Ask for committed offsets, again until the request timeout: a single request is bounded by the hand-over's deadline, and a busy
        coordinator may need longer.
        """
        deadline = Deadline(self._timeout_seconds)
        while True:
            try:
                committed: list[TopicPartition] = consumer.committed(partitions, timeout=self._timeout_seconds)
            except KafkaException as exception:
                error = self._connection.translate(error_of(exception), "asking for committed offsets")
                if not isinstance(error, BrokerUnavailable) or deadline.passed:
                    raise error from exception
                time.sleep(LEADER_CHANGE_SECONDS)
            else:
                return committed

    def _revoke(self, consumer: Any, partitions: list[TopicPartition]) -> None:
        self._on_revoked(self._forget(partitions), Deadline(HAND_OVER_SECONDS))
        consumer.incremental_unassign(partitions)

    def _lose(self, consumer: Any, partitions: list[TopicPartition]) -> None:
        log.warning("partitions.lost", num_partitions=len(partitions))
        self._revoke(consumer, partitions)

    def _forget(self, partitions: list[TopicPartition]) -> list[TopicOffset]:
        return [TopicOffset(p.topic, p.partition, self.positions.pop((p.topic, p.partition), 0)) for p in partitions]


def _report_commit(error: KafkaError | None, _: Any) -> None:
    if error is not None:
        log.debug("offset_commit.refused", error=error.name())


class LogReader(Fetching):
    """Reads chosen partitions from chosen positions; joins no group, though it may own a group's committed offsets."""

    def __init__(
        self, connection: Connection, *, consumer_group: str = "", start: Mapping[tuple[str, int], int] | None = None, fetch_wait_ms: int = 100
    ) -> None:
        """Connect.

        Args:
            connection: How to reach the broker.
            consumer_group: Whose committed offsets it may own.
            start: Where to begin, as for `assign`.
            fetch_wait_ms: How long the broker may hold back an answer for want of records. A reader that is assigned anew waits for
                the answer to its last request first.
        """
        name = consumer_group or f"relax.{connection.client_id}.reader"  # within the run's prefix, for its rights
        settings = connection.settings(group_id=name, enable_partition_eof=True, **READER_SETTINGS | {"fetch_wait_max_ms": fetch_wait_ms})
        super().__init__(Consumer(settings), connection)
        self._shown: set[str] = set()
        if start:
            self.assign(start)

    def assign(self, start: Mapping[tuple[str, int], int]) -> None:
        """Read these partitions from these offsets; 0 means from the oldest record that is left.

        Raises:
            AccessDenied: A topic is hidden from us: the client would wait for its records for ever and never say so.
        """
        for topic in {topic for topic, _ in start} - self._shown:
            self._is_shown(topic)
            self._shown.add(topic)
        self._consumer.assign([TopicPartition(topic, partition, offset or OFFSET_BEGINNING) for (topic, partition), offset in start.items()])

    def read_exactly(self, topic: str, places: Collection[tuple[int, int]]) -> dict[tuple[int, int], Record]:
        """Return the records at these (partition, offset) places.

        Raises:
            BrokerError: A record was purged or never written.
            BrokerUnavailable: The log could not be read within the request timeout without any progress.
        """
        wanted = set(places)
        first: dict[int, int] = {}
        for partition, offset in wanted:
            first[partition] = min(offset, first.get(partition, offset))
        self._prove_there(topic, wanted)
        self.assign({(topic, partition): offset for partition, offset in first.items()})
        found: dict[tuple[int, int], Record] = {}
        progress = time.monotonic()
        while len(found) < len(wanted):
            for record in self.fetch(2000, timeout_seconds=0.5):
                progress = time.monotonic()
                if (record.partition, record.offset) in wanted:
                    found[record.partition, record.offset] = record
            if time.monotonic() - progress > self._timeout_seconds:
                partition, offset = min(wanted - found.keys())
                raise BrokerUnavailable(f"record {topic}[{partition}]@{offset} can't be read; is the broker down?")
        return found

    def _prove_there(self, topic: str, places: Collection[tuple[int, int]]) -> None:
        """Compare with the log's ends first: on a live topic, waiting for a record that is gone would never end."""
        ends = {partition: self.watermarks(topic, partition) for partition in {partition for partition, _ in places}}
        for partition, offset in sorted(places):
            low, high = ends[partition]
            what = f"record {topic}[{partition}]@{offset}"
            if offset < low:
                raise BrokerError(f"{what} was purged: the log begins at {low}; keep records as long as a replay may need them")
            if offset >= high:
                raise BrokerError(f"{what} does not exist: the log ends at {high}; is this the run's own cluster?")

    def read_to_end(self, topics_partitions: Iterable[tuple[str, int]], *, from_offsets: Mapping[tuple[str, int], int] | None = None) -> list[Record]:
        """Return everything that the partitions hold now, from the given offsets (default: all), in order per partition.

        Raises:
            BrokerUnavailable: The log could not be read within the request timeout without any progress.
        """
        starts = {place: (from_offsets or {}).get(place, 0) for place in topics_partitions}
        return list(self.stream({place: (start, self.watermarks(*place)[1]) for place, start in starts.items()}))

    def stream(self, spans: Mapping[Place, tuple[int, int]]) -> Iterator[Record]:
        """Give the records of these spans of the log, in order per partition, and end; only what the client has fetched ahead is held.

        One stream at a time: the reader leaves whatever it read before.

        Args:
            spans: First offset and offset behind the last, by (topic, partition).
        Raises:
            BrokerUnavailable: The log could not be read within the request timeout without any progress.
        """
        yield from map(Record.of, self._messages(spans))

    def stream_bytes(self, spans: Mapping[Place, tuple[int, int]]) -> Iterator[LoggedRecord]:
        """Give the same as `stream`, byte for byte as it lies on the log."""
        yield from map(logged, self._messages(spans))

    def _messages(self, spans: Mapping[Place, tuple[int, int]]) -> Iterator[Any]:
        open_places = {place for place, (start, stop) in spans.items() if start < stop}
        if not open_places:
            return
        self.assign({place: spans[place][0] for place in open_places})
        progress = time.monotonic()
        while open_places:
            for message in self._arrived():
                place = (message.topic(), message.partition())
                if message.error() is not None and message.error().code() == KafkaError._PARTITION_EOF:
                    self._close_span(place, open_places)
                elif self._is_record(message) and place in open_places:
                    if message.offset() < spans[place][1]:
                        yield message
                    if message.offset() + 1 >= spans[place][1]:
                        self._close_span(place, open_places)
                progress = time.monotonic()
            if time.monotonic() - progress > self._timeout_seconds:
                raise BrokerUnavailable(f"reading {sorted(open_places)} stalled for {self._timeout_seconds:.0f} s; see that the broker runs")

    def _arrived(self) -> list[Any]:
        """Wait for one message and take what lies behind it: asking for many at once would wait for many."""
        first = self._consumer.poll(ARRIVAL_SECONDS)
        return [] if first is None else [first, *self._consumer.consume(STREAMED_AT_ONCE - 1, 0)]

    def _close_span(self, place: tuple[str, int], open_places: set[tuple[str, int]]) -> None:
        """Read no further in a partition, so that what lies behind the span is not fetched."""
        if place in open_places and len(open_places) > 1:
            self._consumer.incremental_unassign([TopicPartition(*place)])
        open_places.discard(place)
