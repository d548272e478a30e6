"""Consumers: one that subscribes as a member of a consumer group, and one that assigns its
partitions itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import structlog
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException
from confluent_kafka import TopicPartition as ClientPartition

from relax_events.deadline import Deadline
from relax_events.errors import BrokerError, BrokerUnavailable, ClientFailed
from relax_events.events.container import LoggedRecord
from relax_events.events.parts import TopicOffset
from relax_events.kafka.base_consumer import (
    HANDOVER_SECONDS,
    LEADER_CHANGE_SECONDS,
    BaseConsumer,
    build_reader_settings,
    is_partition_end,
    locate_message,
    to_record,
)
from relax_events.kafka.client_statistics import STATISTICS_SECONDS, HeartbeatMonitor
from relax_events.kafka.connection import Connection, extract_error
from relax_events.kafka.corruption import damage_error
from relax_events.kafka.protocol.group_membership import MembershipMonitor
from relax_events.kafka.records import Record, to_logged_record
from relax_events.kafka.retry import retry_while_unavailable
from relax_events.topics.partitions import TopicPartition

log = structlog.get_logger()
MAX_POLLED_MESSAGES = 500
POLL_SECONDS = 0.05
FIRST_RANGE_OFFSETS = 128

OnRevoked = Callable[[list[TopicOffset], Deadline], None]


class SubscribedConsumer(BaseConsumer):
    """A consumer that subscribes to topics as a member of a consumer group (KIP-848).

    The range assignor gives a member the same partitions of all its topics. Without a committed
    offset it starts at the beginning. Partitions are revoked only inside `fetch`, which calls
    `on_revoked` first, with the revoked partitions and one deadline for all handover work. The
    deadline is well below the session timeout, after which the broker reassigns the partitions in
    any case.
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
        self._heartbeats = HeartbeatMonitor()
        settings = connection.lasting_settings(
            group_id=consumer_group,
            group_protocol="consumer",
            group_remote_assignor="range",
            socket_timeout_ms=int(HANDOVER_SECONDS * 1000),
            on_commit=_log_commit_error,
            report_seconds=STATISTICS_SECONDS,
            stats_cb=self._heartbeats.update,
            **build_reader_settings(),
        )
        super().__init__(Consumer(settings), connection)
        self._connection, self._on_assigned, self._on_revoked = connection, on_assigned, on_revoked
        self._consumer_group, self._is_leaving, self._is_paused = consumer_group, False, False
        self._membership = MembershipMonitor(connection, consumer_group)
        self._consumer.subscribe(
            list(topics),
            on_assign=self._handle_assigned,
            on_revoke=self._handle_revoked,
            on_lost=self._handle_lost,
        )

    def fetch(self, max_records: int = 500, *, timeout_seconds: float) -> list[Record]:
        """See `BaseConsumer.fetch`; also takes part in rebalances.

        Raises:
            ClientFailed: The client stopped working; the worker must restart to get a new one.
        """
        records = super().fetch(max_records, timeout_seconds=timeout_seconds)
        if self._heartbeats.is_silent:
            raise ClientFailed(
                f"this client's heartbeats for {self._consumer_group} have stopped; restart "
                "the worker"
            )
        if records:
            self._membership.mark_active()
        elif self._membership.is_due:
            self._membership.check_assignment(self._consumer.memberid(), frozenset(self.positions))
            unread = {} if self._is_paused else self._find_unread()
            if self._membership.check_unread(unread):
                self._check_fetch_stalled(unread)
        held = [record for record in records if (record.topic, record.partition) in self.positions]
        for record in held:
            self.positions[record.topic, record.partition] = record.offset + 1
        return held

    def commit(self, offsets: Iterable[TopicOffset], *, wait: Deadline | None = None) -> None:
        """Commit the next positions, asynchronously unless `wait` is given.

        A lost commit only means redelivery, which event ids make harmless. After the deadline
        nothing is committed. One commit is bounded by the client's request timeout, which for group
        members equals the handover deadline.
        """
        partitions = [
            ClientPartition(offset.topic, offset.partition, offset.offset) for offset in offsets
        ]
        if not partitions:
            return
        if wait is not None and wait.passed:
            log.warning("offset_commit.overdue", num_partitions=len(partitions))
            return
        try:
            self._consumer.commit(offsets=partitions, asynchronous=wait is None)
        except KafkaException as exception:
            log.warning("offset_commit.refused", error=extract_error(exception).name())

    def pause(self) -> None:
        """Stop receiving records. `fetch` must still be called: it keeps the membership and handles
        rebalances.
        """
        if not self._is_paused:
            self._is_paused = True
            self._consumer.pause(self._consumer.assignment())

    def resume(self) -> None:
        """Receive records again."""
        if self._is_paused:
            self._is_paused = False
            self._consumer.resume(self._consumer.assignment())

    def _find_unread(self) -> dict[TopicPartition, int]:
        """Return the partitions that have unread records, with their positions; empty while the
        broker is down.
        """
        unread = {}
        for (topic, partition), position in self.positions.items():
            try:
                low, high = self._consumer.get_watermark_offsets(
                    ClientPartition(topic, partition), timeout=self._metadata_seconds
                )
            except KafkaException as exception:
                log.debug("ends.unknown", error=extract_error(exception).name())
                return {}
            if high > max(position, low):
                unread[topic, partition] = position
        return unread

    def _check_fetch_stalled(self, unread: Mapping[TopicPartition, int]) -> None:
        """Check with a second client whether unread records exist: the offsets may hold only
        transaction markers, which consumers never receive.

        Raises:
            ClientFailed: The second client receives a record, so this one has stopped fetching.
        """
        reader = LogReader(self._connection, start=unread)
        try:
            found = reader.fetch(1, timeout_seconds=self._metadata_seconds)
        finally:
            reader.close()
        if found:
            where = f"{found[0].topic}[{found[0].partition}]@{found[0].offset}"
            raise ClientFailed(
                f"this client does not fetch the record at {where}; restart the worker"
            )

    def close(self) -> None:
        """Leave the group and close the consumer."""
        self._is_leaving = True
        super().close()

    def _handle_assigned(self, consumer: Any, partitions: list[ClientPartition]) -> None:
        if self._is_leaving:
            return  # a member that is leaving gets no positions
        committed = self._read_committed(consumer, partitions)
        for partition in committed:
            partition.offset = partition.offset if partition.offset >= 0 else OFFSET_BEGINNING
            self.positions[partition.topic, partition.partition] = max(partition.offset, 0)
        consumer.incremental_assign(committed)
        (consumer.pause if self._is_paused else consumer.resume)(
            committed
        )  # a partition that was revoked while paused is assigned as paused
        self._on_assigned([TopicOffset(p.topic, p.partition, max(p.offset, 0)) for p in committed])

    def _read_committed(
        self, consumer: Any, partitions: list[ClientPartition]
    ) -> list[ClientPartition]:
        """Read committed offsets, retrying until the request timeout: one request is bounded by the
        handover deadline, and a busy coordinator may need longer.
        """

        def request() -> list[ClientPartition]:
            try:
                committed: list[ClientPartition] = consumer.committed(
                    partitions, timeout=self._timeout_seconds
                )
            except KafkaException as exception:
                raise self._connection.translate(
                    extract_error(exception), "reading committed offsets"
                ) from exception
            return committed

        try:
            return retry_while_unavailable(
                request, Deadline(self._timeout_seconds), pause_seconds=LEADER_CHANGE_SECONDS
            )
        except BrokerUnavailable as error:
            # the client would wait for ever for an assignment
            raise ClientFailed(f"{error}; restart the worker") from error

    def _handle_revoked(self, consumer: Any, partitions: list[ClientPartition]) -> None:
        self._on_revoked(self._drop_positions(partitions), Deadline(HANDOVER_SECONDS))
        consumer.incremental_unassign(partitions)

    def _handle_lost(self, consumer: Any, partitions: list[ClientPartition]) -> None:
        log.warning("partitions.lost", num_partitions=len(partitions))
        self._handle_revoked(consumer, partitions)

    def _drop_positions(self, partitions: list[ClientPartition]) -> list[TopicOffset]:
        return [
            TopicOffset(p.topic, p.partition, self.positions.pop((p.topic, p.partition), 0))
            for p in partitions
        ]


def _log_commit_error(error: KafkaError | None, _: Any) -> None:
    if error is not None:
        log.debug("offset_commit.refused", error=error.name())


class LogReader(BaseConsumer):
    """A consumer that assigns its partitions and positions itself. It joins no group, but may
    commit a group's offsets through transactions.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        consumer_group: str = "",
        start: Mapping[TopicPartition, int] | None = None,
        fetch_wait_ms: int = 100,
    ) -> None:
        """Create the consumer.

        Args:
            connection: How to reach the broker.
            consumer_group: The consumer group whose offsets it may commit.
            start: Start offsets, as for `assign`.
            fetch_wait_ms: How long the broker may delay a fetch response when no records are
                available. A reader that is reassigned first waits for its last response.
        """
        name = (
            consumer_group or f"relax.{connection.client_id}.reader"
        )  # within the run's prefix, as its ACLs require
        settings = connection.lasting_settings(
            group_id=name,
            enable_partition_eof=True,
            **build_reader_settings() | {"fetch_wait_max_ms": fetch_wait_ms},
        )
        super().__init__(Consumer(settings), connection)
        self._checked_topics: set[str] = set()
        if start:
            self.assign(start)

    def fetch(self, max_records: int = 500, *, timeout_seconds: float) -> list[Record]:
        """See `BaseConsumer.fetch`."""
        records = super().fetch(max_records, timeout_seconds=timeout_seconds)
        self.positions |= {
            (record.topic, record.partition): record.offset + 1 for record in records
        }
        return records

    def assign(self, start: Mapping[TopicPartition, int]) -> None:
        """Read these partitions from these offsets; 0 means from the beginning offset.

        Raises:
            AccessDenied: This principal may not see a topic; the client would wait for its records
                for ever without an error.
        """
        self._offset_after_damage.clear()
        self.positions = dict(start)
        for topic in {topic for topic, _ in start} - self._checked_topics:
            self._has_partition(topic)
            self._checked_topics.add(topic)
        self._consumer.assign(
            [
                ClientPartition(topic, partition, offset or OFFSET_BEGINNING)
                for (topic, partition), offset in start.items()
            ]
        )

    def read_at(
        self, topic: str, places: Collection[tuple[int, int]]
    ) -> dict[tuple[int, int], Record]:
        """Return the records at these (partition, offset) positions.

        Raises:
            BrokerError: A record was purged or never written, or fails its checksum.
            BrokerUnavailable: The log could not be read within the request timeout without any
                progress.
        """
        wanted = set(places)
        first: dict[int, int] = {}
        for partition, offset in wanted:
            first[partition] = min(offset, first.get(partition, offset))
        self._check_offsets_exist(topic, wanted)
        self.assign({(topic, partition): offset for partition, offset in first.items()})
        found: dict[tuple[int, int], Record] = {}
        progress = time.monotonic()
        while len(found) < len(wanted):
            for record in self.fetch(2000, timeout_seconds=0.5):
                progress = time.monotonic()
                if (record.partition, record.offset) in wanted:
                    if record.is_damaged:
                        raise damage_error(topic, record.partition, record.offset)
                    found[record.partition, record.offset] = record
            if time.monotonic() - progress > self._timeout_seconds:
                partition, offset = min(wanted - found.keys())
                raise BrokerUnavailable(
                    f"record {topic}[{partition}]@{offset} can't be read; is the broker down?"
                )
        return found

    def _check_offsets_exist(self, topic: str, places: Collection[tuple[int, int]]) -> None:
        """Compare the positions with the watermarks: waiting for a deleted record on a live topic
        would never end.
        """
        ends = {
            partition: self.watermarks(topic, partition)
            for partition in {partition for partition, _ in places}
        }
        for partition, offset in sorted(places):
            low, high = ends[partition]
            what = f"record {topic}[{partition}]@{offset}"
            if offset < low:
                raise BrokerError(
                    f"{what} was purged: the log begins at {low}; keep records as long as a "
                    "replay may need them"
                )
            if offset >= high:
                raise BrokerError(
                    f"{what} does not exist: the log ends at {high}; is this the run's own cluster?"
                )

    def read_to_end(
        self,
        topics_partitions: Iterable[TopicPartition],
        *,
        from_offsets: Mapping[TopicPartition, int] | None = None,
    ) -> list[Record]:
        """Return all records that the partitions hold now, from the given offsets (default: all),
        in order per partition.

        Raises:
            BrokerError: A record fails its checksum.
            BrokerUnavailable: The log could not be read within the request timeout without any
                progress.
        """
        starts = {place: (from_offsets or {}).get(place, 0) for place in topics_partitions}
        return list(
            self.stream(
                {place: (start, self.watermarks(*place)[1]) for place, start in starts.items()}
            )
        )

    def stream(
        self, spans: Mapping[TopicPartition, tuple[int, int]], *, with_damaged: bool = False
    ) -> Iterator[Record]:
        """Yield the records of these offset ranges, in order per partition, and end. Only
        prefetched records are held in memory.

        One stream at a time: it replaces the reader's assignment.

        Args:
            spans: First offset and the offset behind the last, by partition.
            with_damaged: Whether to yield records that fail their checksum, without values, instead
                of raising an error.
        Raises:
            BrokerError: A record fails its checksum.
            BrokerUnavailable: The log could not be read within the request timeout without any
                progress.
        """
        for found in self._messages(spans, with_damaged=with_damaged):
            yield to_record(found)

    def read_backwards(
        self, place: TopicPartition, *, num_offsets: int = FIRST_RANGE_OFFSETS
    ) -> Iterator[list[Record]]:
        """Yield a partition's records backwards in ranges that double: the newest range first, in
        log order within a range.

        A caller that searches near the end can stop early, at a cost independent of the partition's
        size.

        Args:
            place: The partition.
            num_offsets: The number of offsets in the first range.
        Raises:
            BrokerError, BrokerUnavailable: As `stream`.
        """
        low, stop = self.watermarks(*place)
        while stop > low:
            start = max(low, stop - num_offsets)
            yield list(self.stream({place: (start, stop)}))
            stop, num_offsets = start, 2 * num_offsets

    def stream_raw(self, spans: Mapping[TopicPartition, tuple[int, int]]) -> Iterator[LoggedRecord]:
        """Yield the same as `stream`, as raw bytes."""
        yield from map(to_logged_record, self._messages(spans))

    def _messages(
        self, spans: Mapping[TopicPartition, tuple[int, int]], *, with_damaged: bool = False
    ) -> Iterator[Any]:
        open_places = {place for place, (start, stop) in spans.items() if start < stop}
        if not open_places:
            return
        self.assign({place: spans[place][0] for place in open_places})
        progress = time.monotonic()
        while open_places:
            for found in self._valid_messages(self._poll_messages(), with_damaged=with_damaged):
                place, offset = locate_message(found)
                progress = time.monotonic()
                if place not in open_places:
                    continue
                if not is_partition_end(found) and offset < spans[place][1]:
                    yield found
                if is_partition_end(found) or offset + 1 >= spans[place][1]:
                    self._finish_range(place, open_places)
            if time.monotonic() - progress > self._timeout_seconds:
                raise BrokerUnavailable(
                    f"reading {sorted(open_places)} stalled for {self._timeout_seconds:.0f} "
                    "s; see that the broker runs"
                )

    def _poll_messages(self) -> list[Any]:
        """Wait for one message, then take the messages that are already prefetched: consuming many
        at once would wait for all of them.
        """
        first = self._consumer.poll(POLL_SECONDS)
        return [] if first is None else [first, *self._consumer.consume(MAX_POLLED_MESSAGES - 1, 0)]

    def _finish_range(self, place: tuple[str, int], open_places: set[tuple[str, int]]) -> None:
        """Unassign a partition, so that records behind the range are not fetched."""
        if place in open_places and len(open_places) > 1:
            self._consumer.incremental_unassign([ClientPartition(*place)])
        open_places.discard(place)
