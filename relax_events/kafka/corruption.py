"""Determines the extent and the keys of a record batch that was altered on the broker's disk.

The client reports such a batch as one error at its first offset and misreads the bytes behind it.
Reading must resume behind the batch's end, which no field reveals: it is found by search.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from confluent_kafka import Consumer, KafkaError, TopicPartition

from relax_events.deadline import Deadline
from relax_events.errors import BrokerError, BrokerUnavailable
from relax_events.kafka.connection import Connection
from relax_events.kafka.records import Record

POLL_SECONDS = 0.1
KEYS_SECONDS = 2.0
CHECKSUM_FAILURE = "its record batch fails its checksum: bytes were altered on the broker's disk"
REMEDY = (
    "restore the partition from a replica (delete its folder on the broker that leads it), or "
    "fork the run from an older version"
)


def damage_error(topic: str, partition: int, offset: int) -> BrokerError:
    """Return the error for a damaged record that the caller needs."""
    return BrokerError(
        f"record {topic}[{partition}]@{offset} fails its checksum: its bytes were altered on "
        f"the broker's disk; {REMEDY}"
    )


def read_damaged_records(
    connection: Connection,
    settings: Mapping[str, Any],
    *,
    topic: str,
    partition: int,
    first: int,
    high: int,
) -> tuple[list[Record], int]:
    """Return records without values in place of a damaged batch, and the offset behind the batch.

    Keys and headers are read without checksum verification: they are hints, never trusted. They are
    empty when unreadable.

    Args:
        connection: How to reach the broker.
        settings: The settings of the consumer that met the batch.
        topic: The batch's topic.
        partition: The batch's partition.
        first: The batch's first offset.
        high: The partition's end offset.
    Raises:
        BrokerUnavailable: The broker did not respond within the request timeout.
    """
    name = f"relax.{connection.client_id}.reader"
    alone = {**settings, "enable_partition_eof": True}
    checking = Consumer(connection.settings(group_id=name, **alone))
    try:
        stop = _BatchEndSearch(
            checking, TopicPartition(topic, partition, first), connection.request_timeout_seconds
        ).find_end(high)
    finally:
        checking.close()
    trusting = Consumer(connection.settings(group_id=name, **{**alone, "check_crcs": False}))
    try:
        named = _read_keys(trusting, TopicPartition(topic, partition, first), stop)
    finally:
        trusting.close()
    blank = Record(topic, partition, first, "", b"", {}, 0, is_damaged=True)
    return [named.get(offset, replace(blank, offset=offset)) for offset in range(first, stop)], stop


class _BatchEndSearch:
    """Finds the end of a damaged batch by binary search: a fetch at any of its offsets returns the
    same error.
    """

    def __init__(self, consumer: Any, start: TopicPartition, timeout_seconds: float) -> None:
        self._consumer, self._start, self._timeout_seconds = consumer, start, timeout_seconds

    def find_end(self, high: int) -> int:
        """Return the offset behind the batch, at most `high`."""
        inside, width = self._start.offset, 1
        while (outside := min(inside + width, high)) < high and self._is_inside_batch(outside):
            inside, width = outside, width * 2
        while outside - inside > 1:
            middle = (inside + outside) // 2
            inside, outside = (
                (middle, outside) if self._is_inside_batch(middle) else (inside, middle)
            )
        return max(outside, self._start.offset + 1)

    def _is_inside_batch(self, offset: int) -> bool:
        position = TopicPartition(self._start.topic, self._start.partition, offset)
        self._consumer.assign([position])
        deadline = Deadline(self._timeout_seconds)
        while not deadline.passed:
            message = self._consumer.poll(POLL_SECONDS)
            if message is None:
                continue
            error = message.error()
            if error is None or error.code() == KafkaError._PARTITION_EOF:
                return False
            if error.code() == KafkaError._BAD_MSG:
                return bool(
                    message.offset() == self._start.offset
                )  # otherwise a second damaged batch begins there
            self._consumer.assign(
                [position]
            )  # misread bytes of the previous fetch cause other errors
        raise BrokerUnavailable(
            f"fetching {self._start.topic}[{self._start.partition}]@{offset} got no "
            "response; check that the broker runs"
        )


def _read_keys(consumer: Any, start: TopicPartition, stop: int) -> dict[int, Record]:
    """Read the keys and headers that are still readable."""
    consumer.assign([start])
    found: dict[int, Record] = {}
    deadline = Deadline(KEYS_SECONDS)
    while not deadline.passed:
        message = consumer.poll(POLL_SECONDS)
        if message is None:
            continue
        if message.error() is not None or message.offset() >= stop:
            break
        found[message.offset()] = replace(Record.from_message(message), value=b"", is_damaged=True)
    return found
