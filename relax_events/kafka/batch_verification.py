"""Checks record batches by their own checksums, for logs over whose altered batches Kafka's client
aborts.

Behind a batch that fails its checksum librdkafka 2.16 goes on in the wrong place, and aborts where
the bytes there claim a format of old. A process that is told to examine records has a client that
checks nothing: each batch of which that gives records is fetched once more, by hand, before they
are given to anybody.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property

import structlog

from relax_events.deadline import Deadline
from relax_events.errors import BrokerUnavailable
from relax_events.kafka.connection import Connection
from relax_events.kafka.embedded.storage import crc32c
from relax_events.kafka.protocol.client import Wire, array, text

log = structlog.get_logger()
VARIABLE = "RELAX_EXAMINE_RECORDS"
FETCH, FETCH_VERSION, READ_UNCOMMITTED, OUT_OF_RANGE = 1, 4, 0, 1
FETCH_BYTES = 256 * 1024  # a record batch that is larger comes whole all the same, alone
MAX_ANSWER_BYTES = 256 * 1024 * 1024
LENGTH_FROM, CHECKSUM_FROM, HEADER_BYTES, FORMAT = 12, 17, 61, 2
RETRY_SECONDS = 0.05

Place = tuple[str, int]


def is_asked_for() -> bool:
    """Tell whether readers of this process are to examine records, by `RELAX_EXAMINE_RECORDS=1`."""
    return os.environ.get(VARIABLE) == "1"


@dataclass(frozen=True)
class Batch:
    """A record batch as its bytes tell: its first offset, the one behind its last, and from its
    checksum on all that this covers.

    That is empty where the batch is cut off, or its length can't be believed.
    """

    first: int
    stop: int
    checked: bytes

    @cached_property
    def is_sound(self) -> bool:
        """Whether it has its checksum."""
        return (
            self.checked != b""
            and crc32c(self.checked[4:]) == struct.unpack_from(">I", self.checked)[0]
        )


class Examiner:
    """Tells which record batches of a log were altered, by a connection of its own for each
    partition. Close it in the end.
    """

    def __init__(self, leader: Callable[[str, int], Connection], *, timeout_seconds: float) -> None:
        """Begin without a connection.

        Args:
            leader: Gives how to reach the broker that leads a partition; raises BrokerUnavailable
                where none does.
            timeout_seconds: How long a broker may take to answer, over all attempts.
        """
        self._leader, self._timeout_seconds = leader, timeout_seconds
        self._partitions: dict[Place, PartitionReader] = {}
        self._met: dict[Place, range] = {}

    def close(self) -> None:
        """Leave the brokers."""
        for place in list(self._partitions):
            self._leave(place)

    def altered(self, topic: str, partition: int, offset: int) -> range | None:
        """Return the offsets of the record batch that holds a record, if it was altered; None where
        it has its checksum. Each is logged once.

        Raises:
            BrokerUnavailable: No broker answered within the timeout.
        """
        batch = self._batch(topic, partition, offset)
        if batch is not None and batch.is_sound:
            return None
        offsets = (
            range(offset, offset + 1)
            if batch is None
            else range(batch.first, max(batch.stop, offset + 1))
        )
        if self._met.get((topic, partition)) != offsets:
            self._met[topic, partition] = offsets
            log.error(
                "record_batch.damaged",
                topic=topic,
                partition=partition,
                offset=offsets.start,
                num_records=len(offsets),
                resumed_at=offsets.stop,
            )
        return offsets

    def _batch(self, topic: str, partition: int, offset: int) -> Batch | None:
        deadline = Deadline(self._timeout_seconds)
        while True:
            try:
                if (topic, partition) not in self._partitions:
                    self._partitions[topic, partition] = PartitionReader(
                        self._leader(topic, partition), topic, partition
                    )
                return self._partitions[topic, partition].batch_of(offset)
            except BrokerUnavailable:
                self._leave((topic, partition))
                if deadline.passed:
                    raise
                time.sleep(RETRY_SECONDS)

    def _leave(self, place: Place) -> None:
        if (reader := self._partitions.pop(place, None)) is not None:
            reader.close()


class PartitionReader:
    """Fetches record batches of one partition as bytes, and keeps those of the newest answer.

    Source: Kafka documentation, "Record Batch"; Kafka protocol guide (Fetch v4).
    """

    def __init__(self, leader: Connection, topic: str, partition: int) -> None:
        """Connect to the broker that leads the partition."""
        self._topic, self._partition = topic, partition
        self._batches: list[Batch] = []
        self._stack = ExitStack()
        self._wire = self._stack.enter_context(Wire(leader))

    def close(self) -> None:
        """Leave the broker."""
        self._stack.close()

    def batch_of(self, offset: int) -> Batch | None:
        """Return the record batch that holds a record; None where none is there, or none that can
        be told from others.

        Raises:
            BrokerUnavailable: The broker does not answer, or does not lead the partition any more.
        """
        if (batch := self._kept(offset)) is None or not batch.checked:
            self._batches = list(batches(self._fetched(offset)))
            batch = self._kept(offset)
        return batch

    def _kept(self, offset: int) -> Batch | None:
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

    def _fetched(self, offset: int) -> bytes:
        one = struct.pack(">iqi", self._partition, offset, FETCH_BYTES)
        body = struct.pack(">iiiib", -1, 0, 1, FETCH_BYTES, READ_UNCOMMITTED) + array(
            [text(self._topic) + array([one])]
        )
        answer = self._wire.ask(FETCH, FETCH_VERSION, body, max_bytes=MAX_ANSWER_BYTES)
        answer.take("i")  # throttled for so long
        answer.take("i")
        answer.text()
        answer.take("i")
        answer.take("i")
        error, _high, _stable, num_aborted = (
            answer.take("h"),
            answer.take("q"),
            answer.take("q"),
            answer.take("i"),
        )
        if error == OUT_OF_RANGE:
            return b""
        if error:
            place = f"{self._topic}[{self._partition}]@{offset}"
            raise BrokerUnavailable(
                f"{place} can't be examined (error {error}); see that all brokers run"
            )
        for _ in range(2 * num_aborted):
            answer.take("q")
        return answer.blob()


def batches(data: bytes) -> Iterator[Batch]:
    """Take record batches apart, as far as their lengths can be believed; the last one may be cut
    off.
    """
    at = 0
    while at + HEADER_BYTES <= len(data):
        first, length, _epoch, form, _checksum, _attributes, delta = struct.unpack_from(
            ">qiibIhi", data, at
        )
        end = at + LENGTH_FROM + length
        is_whole = form == FORMAT and at + HEADER_BYTES <= end <= len(data)
        yield Batch(first, first + delta + 1, data[at + CHECKSUM_FROM : end] if is_whole else b"")
        at = end if is_whole else len(data)
