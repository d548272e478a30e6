"""Verifies the checksums of record batches outside of librdkafka.

librdkafka 2.16 resumes at a wrong position behind a batch that fails its checksum, and aborts when
the bytes there look like an old batch format. With `RELAX_EXAMINE_RECORDS=1` the client checks no
checksums. Instead, each batch is fetched a second time and verified here before its records are
used.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property

import structlog

from relax_events.deadline import Deadline
from relax_events.errors import BrokerUnavailable
from relax_events.kafka.connection import Connection, retry_while_unavailable
from relax_events.kafka.embedded.storage import compute_crc32c
from relax_events.kafka.protocol.client import KafkaProtocolClient, encode_array, encode_string
from relax_events.topics.partitions import TopicPartition

log = structlog.get_logger()
VARIABLE = "RELAX_EXAMINE_RECORDS"
FETCH, FETCH_VERSION, READ_UNCOMMITTED, OUT_OF_RANGE = 1, 4, 0, 1
FETCH_BYTES = 256 * 1024  # a larger record batch is returned complete, as the only one
MAX_RESPONSE_BYTES = 256 * 1024 * 1024
LENGTH_FROM, CHECKSUM_FROM, HEADER_BYTES, FORMAT = 12, 17, 61, 2
RETRY_SECONDS = 0.05


def is_verification_enabled() -> bool:
    """Return whether consumers of this process verify record batches: `RELAX_EXAMINE_RECORDS=1`."""
    return os.environ.get(VARIABLE) == "1"


def enable_verification() -> None:
    """Let all consumers that this process opens from now on verify record batches."""
    os.environ[VARIABLE] = "1"


@dataclass(frozen=True)
class RecordBatch:
    """A record batch: its first offset, the offset behind its last, and its bytes from the checksum
    on.

    `checked` is empty when the batch is truncated or its length is implausible.
    """

    first: int
    stop: int
    checked: bytes

    @cached_property
    def has_valid_checksum(self) -> bool:
        """Whether the batch matches its checksum."""
        return (
            self.checked != b""
            and compute_crc32c(self.checked[4:]) == struct.unpack_from(">I", self.checked)[0]
        )


class BatchVerifier:
    """Finds altered record batches, over one connection for each partition. Close it after use."""

    def __init__(self, leader: Callable[[str, int], Connection], *, timeout_seconds: float) -> None:
        """Create a verifier without open connections.

        Args:
            leader: Returns the connection to a partition's leader; raises BrokerUnavailable without
                a leader.
            timeout_seconds: Bound of all attempts of one look-up together.
        """
        self._leader, self._timeout_seconds = leader, timeout_seconds
        self._fetchers: dict[TopicPartition, BatchFetcher] = {}
        self._reported: dict[TopicPartition, range] = {}

    def close(self) -> None:
        """Close all connections."""
        for topic_partition in list(self._fetchers):
            self._disconnect(topic_partition)

    def find_altered_batch(self, topic: str, partition: int, offset: int) -> range | None:
        """Return the offsets of the record's batch if the batch was altered, None if its checksum
        is valid. Logs each altered batch once.

        Raises:
            BrokerUnavailable: No broker responded within the timeout.
        """
        batch = self._fetch_batch(topic, partition, offset)
        if batch is not None and batch.has_valid_checksum:
            return None
        offsets = (
            range(offset, offset + 1)
            if batch is None
            else range(batch.first, max(batch.stop, offset + 1))
        )
        if self._reported.get((topic, partition)) != offsets:
            self._reported[topic, partition] = offsets
            log.error(
                "record_batch.damaged",
                topic=topic,
                partition=partition,
                offset=offsets.start,
                num_records=len(offsets),
                resumed_at=offsets.stop,
            )
        return offsets

    def _fetch_batch(self, topic: str, partition: int, offset: int) -> RecordBatch | None:
        def request() -> RecordBatch | None:
            try:
                if (topic, partition) not in self._fetchers:
                    self._fetchers[topic, partition] = BatchFetcher(
                        self._leader(topic, partition), topic, partition
                    )
                return self._fetchers[topic, partition].find_batch(offset)
            except BrokerUnavailable:
                self._disconnect((topic, partition))
                raise

        return retry_while_unavailable(
            request, Deadline(self._timeout_seconds), pause_seconds=RETRY_SECONDS
        )

    def _disconnect(self, topic_partition: TopicPartition) -> None:
        if (reader := self._fetchers.pop(topic_partition, None)) is not None:
            reader.close()


class BatchFetcher:
    """Fetches record batches of one partition as bytes, and caches those of the newest response.

    Source: Kafka documentation, "Record Batch"; Kafka protocol guide (Fetch v4).
    """

    def __init__(self, leader: Connection, topic: str, partition: int) -> None:
        """Connect to the partition's leader."""
        self._topic, self._partition = topic, partition
        self._batches: list[RecordBatch] = []
        self._stack = ExitStack()
        self._client = self._stack.enter_context(KafkaProtocolClient(leader))

    def close(self) -> None:
        """Close the connection."""
        self._stack.close()

    def find_batch(self, offset: int) -> RecordBatch | None:
        """Return the record's batch; None when it is missing or its boundaries can't be determined.

        Raises:
            BrokerUnavailable: The broker does not respond, or no longer leads the partition.
        """
        if (batch := self._find_cached(offset)) is None or not batch.checked:
            self._batches = list(split_batches(self._fetch(offset)))
            batch = self._find_cached(offset)
        return batch

    def _find_cached(self, offset: int) -> RecordBatch | None:
        last = max(
            (batch for batch in self._batches if batch.first <= offset),
            key=lambda batch: batch.first,
            default=None,
        )
        return (
            last
            if last is not None and (last is not self._batches[-1] or offset < last.stop)
            else None
        )

    def _fetch(self, offset: int) -> bytes:
        one = struct.pack(">iqi", self._partition, offset, FETCH_BYTES)
        body = struct.pack(">iiiib", -1, 0, 1, FETCH_BYTES, READ_UNCOMMITTED) + encode_array(
            [encode_string(self._topic) + encode_array([one])]
        )
        response = self._client.request(FETCH, FETCH_VERSION, body, max_bytes=MAX_RESPONSE_BYTES)
        response.read_int32()  # throttle time
        response.read_int32()
        response.read_string()
        response.read_int32()
        response.read_int32()
        error, _high, _stable, num_aborted = (
            response.read_int16(),
            response.read_int64(),
            response.read_int64(),
            response.read_int32(),
        )
        if error == OUT_OF_RANGE:
            return b""
        if error:
            location = f"{self._topic}[{self._partition}]@{offset}"
            raise BrokerUnavailable(
                f"{location} can't be verified (error {error}); check that all brokers run"
            )
        for _ in range(2 * num_aborted):
            response.read_int64()
        return response.read_bytes()


def split_batches(data: bytes) -> Iterator[RecordBatch]:
    """Split bytes into record batches, up to the first implausible length; the last one may be
    truncated.
    """
    at = 0
    while at + HEADER_BYTES <= len(data):
        first, length, _epoch, form, _checksum, _attributes, delta = struct.unpack_from(
            ">qiibIhi", data, at
        )
        end = at + LENGTH_FROM + length
        is_whole = form == FORMAT and at + HEADER_BYTES <= end <= len(data)
        yield RecordBatch(
            first, first + delta + 1, data[at + CHECKSUM_FROM : end] if is_whole else b""
        )
        at = end if is_whole else len(data)
