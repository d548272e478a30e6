"""A consumer that assigns its partitions and positions itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import structlog
from confluent_kafka import Consumer
from confluent_kafka import TopicPartition as ClientPartition

from relax_events.errors import BrokerError, BrokerUnavailable
from relax_events.events.container import LoggedRecord
from relax_events.kafka.base_consumer import (
    BaseConsumer,
    build_reader_settings,
    is_partition_end,
)
from relax_events.kafka.connection import Connection
from relax_events.kafka.records import Record, to_logged_record
from relax_events.kafka.workarounds.stale_leaders import leave_out_outdated_brokers
from relax_events.topics.partitions import TopicPartition

log = structlog.get_logger()
MAX_POLLED_MESSAGES = 500
POLL_SECONDS = 0.05
FIRST_RANGE_OFFSETS = 128


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
        fetch_min_bytes: int = 1,
    ) -> None:
        """Create the consumer.

        Args:
            connection: How to reach the broker.
            consumer_group: The consumer group whose offsets it may commit.
            start: Start offsets, as for `assign`.
            fetch_wait_ms: How long the broker may delay a fetch response when fewer bytes than
                `fetch_min_bytes` are available. A reader that is reassigned first waits for its
                last response.
            fetch_min_bytes: More than one byte makes fewer, larger responses of many small ones.
        """
        name = (
            consumer_group or f"relax.{connection.client_id}.reader"
        )  # within the run's prefix, as its ACLs require
        self._settings = {
            "group_id": name,
            "enable_partition_eof": True,
            **build_reader_settings(),
            "fetch_wait_max_ms": fetch_wait_ms,
            "fetch_min_bytes": fetch_min_bytes,
        }
        super().__init__(Consumer(connection.lasting_settings(**self._settings)), connection)
        self._replacing = threading.Lock()
        self._is_paused = False
        self._checked_topics: set[str] = set()
        if start:
            self.assign(start)

    def lag(self) -> dict[TopicPartition, int]:
        """See `BaseConsumer.lag`; may be called by another thread."""
        with self._replacing:
            return super().lag()

    def fetch(self, max_records: int = 500, *, timeout_seconds: float) -> list[Record]:
        """See `BaseConsumer.fetch`. A client that waits for brokers that no longer lead is
        replaced, and reading continues where it was.
        """
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
        self.positions = dict(start)
        for topic in {topic for topic, _ in start} - self._checked_topics:
            self._has_partition(topic)
            self._checked_topics.add(topic)
        partitions = [
            ClientPartition(topic, partition, offset)
            for (topic, partition), offset in start.items()
        ]
        self._find_beginnings(at for at in partitions if not at.offset)
        self._consumer.assign(partitions)

    def _replace_client(self, newer: Mapping[TopicPartition, int]) -> None:
        log.warning(
            "reader.client_replaced",
            reason="it did not find the new leaders",
            leaders={
                f"{topic}[{partition}]": node_id for (topic, partition), node_id in newer.items()
            },
        )
        self._connection = leave_out_outdated_brokers(
            self._connection, sorted({topic for topic, _ in newer})
        )
        consumer = Consumer(self._connection.lasting_settings(**self._settings))
        with self._replacing:
            self._consumer, outdated = consumer, self._consumer
        outdated.close()
        self.assign(self.positions)
        if self._is_paused:
            self.pause()

    def pause(self) -> None:
        """Request no more records until `resume`, and forget prefetched records."""
        self._is_paused = True
        self._consumer.pause(self._consumer.assignment())

    def resume(self) -> None:
        """Read on behind the last record that was fetched."""
        self._is_paused = False
        self._consumer.resume(self._consumer.assignment())

    def read_at(
        self, topic: str, positions: Collection[tuple[int, int]]
    ) -> dict[tuple[int, int], Record]:
        """Return the records at these (partition, offset) positions.

        Raises:
            BrokerError: A record was purged or never written, or fails its checksum.
            BrokerUnavailable: The log could not be read within the request timeout without any
                progress.
        """
        requested_positions = set(positions)
        first: dict[int, int] = {}
        for partition, offset in requested_positions:
            first[partition] = min(offset, first.get(partition, offset))
        self._check_offsets_exist(topic, requested_positions)
        self.assign({(topic, partition): offset for partition, offset in first.items()})
        records: dict[tuple[int, int], Record] = {}
        progress = time.monotonic()
        while len(records) < len(requested_positions):
            for record in self.fetch(2000, timeout_seconds=0.5):
                progress = time.monotonic()
                if (record.partition, record.offset) in requested_positions:
                    records[record.partition, record.offset] = record
            if time.monotonic() - progress > self._timeout_seconds:
                partition, offset = min(requested_positions - records.keys())
                raise BrokerUnavailable(
                    f"record {topic}[{partition}]@{offset} can't be read; is the broker down?"
                )
        return records

    def _check_offsets_exist(self, topic: str, positions: Collection[tuple[int, int]]) -> None:
        """Compare the positions with the watermarks: waiting for a deleted record on a live topic
        would never end.
        """
        ends = {
            partition: self.watermarks(topic, partition)
            for partition in {partition for partition, _ in positions}
        }
        for partition, offset in sorted(positions):
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
        partitions: Iterable[TopicPartition],
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
        starts = {partition: (from_offsets or {}).get(partition, 0) for partition in partitions}
        return list(
            self.stream(
                {
                    partition: (start, self.watermarks(*partition)[1])
                    for partition, start in starts.items()
                }
            )
        )

    def stream(self, ranges: Mapping[TopicPartition, tuple[int, int]]) -> Iterator[Record]:
        """Yield the records of these offset ranges, in order per partition, and end. Only
        prefetched records are held in memory.

        One stream at a time: it replaces the reader's assignment.

        Args:
            ranges: First offset and the offset behind the last, by partition.
        Raises:
            BrokerError: A record fails its checksum.
            BrokerUnavailable: The log could not be read within the request timeout without any
                progress.
        """
        yield from map(Record.from_message, self._messages(ranges))

    def read_backwards(
        self, partition: TopicPartition, *, num_offsets: int = FIRST_RANGE_OFFSETS
    ) -> Iterator[list[Record]]:
        """Yield a partition's records backwards in ranges that double: the newest range first, in
        log order within a range.

        A caller that searches near the end can stop early, at a cost independent of the partition's
        size.

        Args:
            partition: The partition.
            num_offsets: The number of offsets in the first range.
        Raises:
            BrokerError, BrokerUnavailable: As `stream`.
        """
        low, stop = self.watermarks(*partition)
        while stop > low:
            start = max(low, stop - num_offsets)
            yield list(self.stream({partition: (start, stop)}))
            stop, num_offsets = start, 2 * num_offsets

    def stream_raw(
        self, ranges: Mapping[TopicPartition, tuple[int, int]]
    ) -> Iterator[LoggedRecord]:
        """Yield the same as `stream`, as raw bytes."""
        yield from map(to_logged_record, self._messages(ranges))

    def _messages(self, ranges: Mapping[TopicPartition, tuple[int, int]]) -> Iterator[Any]:
        open_partitions = {partition for partition, (start, stop) in ranges.items() if start < stop}
        if not open_partitions:
            return
        self.assign({partition: ranges[partition][0] for partition in open_partitions})
        progress = time.monotonic()
        while open_partitions:
            for message in self._valid_messages(self._poll_messages()):
                partition, offset = (message.topic(), message.partition()), message.offset()
                progress = time.monotonic()
                if partition not in open_partitions:
                    continue
                if not is_partition_end(message) and offset < ranges[partition][1]:
                    yield message
                if is_partition_end(message) or offset + 1 >= ranges[partition][1]:
                    self._finish_range(partition, open_partitions)
            if time.monotonic() - progress > self._timeout_seconds:
                raise BrokerUnavailable(
                    f"reading {sorted(open_partitions)} stalled for {self._timeout_seconds:.0f} "
                    "s; see that the broker runs"
                )

    def _poll_messages(self) -> list[Any]:
        """Wait for one message, then take the messages that are already prefetched: consuming many
        at once would wait for all of them.
        """
        first = self._consumer.poll(POLL_SECONDS)
        return [] if first is None else [first, *self._consumer.consume(MAX_POLLED_MESSAGES - 1, 0)]

    def _finish_range(
        self, partition: TopicPartition, open_partitions: set[TopicPartition]
    ) -> None:
        """Unassign a partition, so that records behind the range are not fetched."""
        if partition in open_partitions and len(open_partitions) > 1:
            self._consumer.incremental_unassign([ClientPartition(*partition)])
        open_partitions.discard(partition)
