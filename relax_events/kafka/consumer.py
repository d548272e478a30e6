"""Reads records: as a member of a consumer group, or as a reader that chooses its partitions and
positions itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import structlog
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, TopicPartition

from relax_events.deadline import Deadline
from relax_events.errors import BrokerError, BrokerUnavailable, ClientFailed
from relax_events.events.container import LoggedRecord
from relax_events.events.parts import TopicOffset
from relax_events.kafka.base_consumer import (
    HAND_OVER_SECONDS,
    LEADER_CHANGE_SECONDS,
    Fetching,
    Place,
    is_end,
    place_of,
    reader_settings,
    record_of,
)
from relax_events.kafka.client_statistics import STATISTICS_SECONDS, HeartbeatWatch
from relax_events.kafka.connection import Connection, error_of
from relax_events.kafka.corruption import damage_error
from relax_events.kafka.protocol.group_membership import MembershipWatch
from relax_events.kafka.records import Record, logged

log = structlog.get_logger()
STREAMED_AT_ONCE = 500
ARRIVAL_SECONDS = 0.05
FIRST_SPAN = 128

OnRevoked = Callable[[list[TopicOffset], Deadline], None]


class GroupConsumer(Fetching):
    """A member of a consumer group (KIP-848, range assignor: the same partitions of all its
    topics).

    Where the group has no committed offset it starts at the oldest record. Partitions are given
    back only inside `fetch`; `on_revoked` is called first, with the partitions that go and the one
    deadline that all hand-over work shares: it lies well within the session timeout, after which
    the broker would take the partitions anyhow.
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
        self._heartbeats = HeartbeatWatch()
        settings = connection.settings(
            group_id=consumer_group,
            group_protocol="consumer",
            group_remote_assignor="range",
            socket_timeout_ms=int(HAND_OVER_SECONDS * 1000),
            on_commit=_report_commit,
            statistics_interval_ms=int(STATISTICS_SECONDS * 1000),
            stats_cb=self._heartbeats.note,
            **reader_settings(),
        )
        super().__init__(Consumer(settings), connection)
        self._connection, self._on_assigned, self._on_revoked = connection, on_assigned, on_revoked
        self._consumer_group, self._is_leaving, self._is_paused = consumer_group, False, False
        self._membership = MembershipWatch(connection, consumer_group)
        self._consumer.subscribe(
            list(topics), on_assign=self._assign, on_revoke=self._revoke, on_lost=self._lose
        )

    def fetch(self, max_records: int = 500, *, timeout_seconds: float) -> list[Record]:
        """See `Fetching.fetch`; also takes part in rebalances.

        Raises:
            ClientFailed: The client does nothing any more; only a new one can go on.
        """
        records = super().fetch(max_records, timeout_seconds=timeout_seconds)
        if self._heartbeats.is_silent:
            raise ClientFailed(
                f"this client's heartbeats for {self._consumer_group} have stopped; the "
                "worker must start again to go on"
            )
        if records:
            self._membership.hear()
        elif self._membership.is_due:
            self._membership.look(self._consumer.memberid(), frozenset(self.positions))
            unread = {} if self._is_paused else self._unread()
            if self._membership.look_at_unread(unread):
                self._prove_unreadable(unread)
        held = [record for record in records if (record.topic, record.partition) in self.positions]
        for record in held:
            self.positions[record.topic, record.partition] = record.offset + 1
        return held

    def commit(self, offsets: Iterable[TopicOffset], *, wait: Deadline | None = None) -> None:
        """Commit next positions. A lost commit means redelivery, which ids make harmless; so
        without `wait` nobody waits.

        With a deadline that has passed nothing is committed. One commit is bounded by the client's
        request timeout, which for group members is as short as the hand-over's deadline.
        """
        partitions = [
            TopicPartition(offset.topic, offset.partition, offset.offset) for offset in offsets
        ]
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
        """Take no records from now on. `fetch` must still be called: it keeps the membership, and
        gives partitions back that others should have.
        """
        if not self._is_paused:
            self._is_paused = True
            self._consumer.pause(self._consumer.assignment())

    def resume(self) -> None:
        """Take records again."""
        if self._is_paused:
            self._is_paused = False
            self._consumer.resume(self._consumer.assignment())

    def _unread(self) -> dict[Place, int]:
        """Ask the broker where records lie behind our positions; nothing is known while it is
        away.
        """
        unread = {}
        for (topic, partition), position in self.positions.items():
            try:
                low, high = self._consumer.get_watermark_offsets(
                    TopicPartition(topic, partition), timeout=self._ask_seconds
                )
            except KafkaException as exception:
                log.debug("ends.unknown", error=error_of(exception).name())
                return {}
            if high > max(position, low):
                unread[topic, partition] = position
        return unread

    def _prove_unreadable(self, unread: Mapping[Place, int]) -> None:
        """Have another client read what lies behind our positions: it may be marks of transactions
        alone, which nobody is given.

        Raises:
            ClientFailed: The other one is given a record.
        """
        reader = LogReader(self._connection, start=unread)
        try:
            found = reader.fetch(1, timeout_seconds=self._ask_seconds)
        finally:
            reader.close()
        if found:
            where = f"{found[0].topic}[{found[0].partition}]@{found[0].offset}"
            raise ClientFailed(
                f"this client does not fetch what lies at {where}; the worker must start "
                "again to go on"
            )

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
        (consumer.pause if self._is_paused else consumer.resume)(
            committed
        )  # one that was taken away while paused comes back paused
        self._on_assigned([TopicOffset(p.topic, p.partition, max(p.offset, 0)) for p in committed])

    def _committed(self, consumer: Any, partitions: list[TopicPartition]) -> list[TopicPartition]:
        """Ask for committed offsets, again until the request timeout: a single request is bounded
        by the hand-over's deadline, and a busy coordinator may need longer.
        """
        deadline = Deadline(self._timeout_seconds)
        while True:
            try:
                committed: list[TopicPartition] = consumer.committed(
                    partitions, timeout=self._timeout_seconds
                )
            except KafkaException as exception:
                error = self._connection.translate(
                    error_of(exception), "asking for committed offsets"
                )
                if not isinstance(error, BrokerUnavailable):
                    raise error from exception
                if (
                    deadline.passed
                ):  # the client now waits for an assignment that it will not be given
                    raise ClientFailed(
                        f"{error}; the worker must start again to go on"
                    ) from exception
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
        return [
            TopicOffset(p.topic, p.partition, self.positions.pop((p.topic, p.partition), 0))
            for p in partitions
        ]


def _report_commit(error: KafkaError | None, _: Any) -> None:
    if error is not None:
        log.debug("offset_commit.refused", error=error.name())


class LogReader(Fetching):
    """Reads chosen partitions from chosen positions; joins no group, though it may own a group's
    committed offsets.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        consumer_group: str = "",
        start: Mapping[tuple[str, int], int] | None = None,
        fetch_wait_ms: int = 100,
    ) -> None:
        """Connect.

        Args:
            connection: How to reach the broker.
            consumer_group: Whose committed offsets it may own.
            start: Where to begin, as for `assign`.
            fetch_wait_ms: How long the broker may hold back an answer for want of records. A reader
                that is assigned anew waits for the answer to its last request first.
        """
        name = (
            consumer_group or f"relax.{connection.client_id}.reader"
        )  # within the run's prefix, for its rights
        settings = connection.settings(
            group_id=name,
            enable_partition_eof=True,
            **reader_settings() | {"fetch_wait_max_ms": fetch_wait_ms},
        )
        super().__init__(Consumer(settings), connection)
        self._shown: set[str] = set()
        if start:
            self.assign(start)

    def fetch(self, max_records: int = 500, *, timeout_seconds: float) -> list[Record]:
        """See `Fetching.fetch`."""
        records = super().fetch(max_records, timeout_seconds=timeout_seconds)
        self.positions |= {
            (record.topic, record.partition): record.offset + 1 for record in records
        }
        return records

    def assign(self, start: Mapping[tuple[str, int], int]) -> None:
        """Read these partitions from these offsets; 0 means from the oldest record that is left.

        Raises:
            AccessDenied: A topic is hidden from us: the client would wait for its records for ever
                and never say so.
        """
        self._behind_damage.clear()
        self.positions = dict(start)
        for topic in {topic for topic, _ in start} - self._shown:
            self._is_shown(topic)
            self._shown.add(topic)
        self._consumer.assign(
            [
                TopicPartition(topic, partition, offset or OFFSET_BEGINNING)
                for (topic, partition), offset in start.items()
            ]
        )

    def read_exactly(
        self, topic: str, places: Collection[tuple[int, int]]
    ) -> dict[tuple[int, int], Record]:
        """Return the records at these (partition, offset) places.

        Raises:
            BrokerError: A record was purged or never written, or fails its checksum.
            BrokerUnavailable: The log could not be read within the request timeout without any
                progress.
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
                    if record.is_damaged:
                        raise damage_error(topic, record.partition, record.offset)
                    found[record.partition, record.offset] = record
            if time.monotonic() - progress > self._timeout_seconds:
                partition, offset = min(wanted - found.keys())
                raise BrokerUnavailable(
                    f"record {topic}[{partition}]@{offset} can't be read; is the broker down?"
                )
        return found

    def _prove_there(self, topic: str, places: Collection[tuple[int, int]]) -> None:
        """Compare with the log's ends first: on a live topic, waiting for a record that is gone
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
        topics_partitions: Iterable[tuple[str, int]],
        *,
        from_offsets: Mapping[tuple[str, int], int] | None = None,
    ) -> list[Record]:
        """Return everything that the partitions hold now, from the given offsets (default: all), in
        order per partition.

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
        self, spans: Mapping[Place, tuple[int, int]], *, with_damaged: bool = False
    ) -> Iterator[Record]:
        """Give the records of these spans of the log, in order per partition, and end; only what
        the client has fetched ahead is held.

        One stream at a time: the reader leaves whatever it read before.

        Args:
            spans: First offset and offset behind the last, by (topic, partition).
            with_damaged: Whether records that fail their checksum are given, without their values,
                and do not end the stream.
        Raises:
            BrokerError: A record fails its checksum.
            BrokerUnavailable: The log could not be read within the request timeout without any
                progress.
        """
        for found in self._messages(spans, with_damaged=with_damaged):
            yield record_of(found)

    def backwards(self, place: Place, *, num_offsets: int = FIRST_SPAN) -> Iterator[list[Record]]:
        """Give a partition's records from its end on, in spans that double: the newest span first,
        within a span in log order.

        Whoever looks for something near the end stops there; what it costs does not grow with the
        partition.

        Args:
            place: The partition.
            num_offsets: Of the first span.
        Raises:
            BrokerError, BrokerUnavailable: As `stream`.
        """
        low, stop = self.watermarks(*place)
        while stop > low:
            start = max(low, stop - num_offsets)
            yield list(self.stream({place: (start, stop)}))
            stop, num_offsets = start, 2 * num_offsets

    def stream_bytes(self, spans: Mapping[Place, tuple[int, int]]) -> Iterator[LoggedRecord]:
        """Give the same as `stream`, byte for byte as it lies on the log."""
        yield from map(logged, self._messages(spans))

    def _messages(
        self, spans: Mapping[Place, tuple[int, int]], *, with_damaged: bool = False
    ) -> Iterator[Any]:
        open_places = {place for place, (start, stop) in spans.items() if start < stop}
        if not open_places:
            return
        self.assign({place: spans[place][0] for place in open_places})
        progress = time.monotonic()
        while open_places:
            for found in self._sound(self._arrived(), with_damaged=with_damaged):
                place, offset = place_of(found)
                progress = time.monotonic()
                if place not in open_places:
                    continue
                if not is_end(found) and offset < spans[place][1]:
                    yield found
                if is_end(found) or offset + 1 >= spans[place][1]:
                    self._close_span(place, open_places)
            if time.monotonic() - progress > self._timeout_seconds:
                raise BrokerUnavailable(
                    f"reading {sorted(open_places)} stalled for {self._timeout_seconds:.0f} "
                    "s; see that the broker runs"
                )

    def _arrived(self) -> list[Any]:
        """Wait for one message and take what lies behind it: asking for many at once would wait for
        many.
        """
        first = self._consumer.poll(ARRIVAL_SECONDS)
        return [] if first is None else [first, *self._consumer.consume(STREAMED_AT_ONCE - 1, 0)]

    def _close_span(self, place: tuple[str, int], open_places: set[tuple[str, int]]) -> None:
        """Read no further in a partition, so that what lies behind the span is not fetched."""
        if place in open_places and len(open_places) > 1:
            self._consumer.incremental_unassign([TopicPartition(*place)])
        open_places.discard(place)
