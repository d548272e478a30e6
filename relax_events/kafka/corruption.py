"""Record batches whose checksum fails, since their bytes were altered on the broker's disk: how far
they reach, and whom they concern.

The client gives such a batch as one error at its first offset and then misreads what lies behind
it, so reading has to begin anew behind
its end, which nothing tells: it is found by trying.
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
REMEDY = (
    "restore the partition from a replica (delete its folder on the broker that leads it), or "
    "fork the run from an older version"
)


def damage_error(topic: str, partition: int, offset: int) -> BrokerError:
    """Return the error of whoever can't do without a record that is damaged."""
    return BrokerError(
        f"record {topic}[{partition}]@{offset} fails its checksum: its bytes were altered on "
        f"the broker's disk; {REMEDY}"
    )


def damaged_records(
    connection: Connection,
    settings: Mapping[str, Any],
    *,
    topic: str,
    partition: int,
    first: int,
    high: int,
) -> tuple[list[Record], int]:
    """Look at a damaged record batch and return what stands for its records, without values, and
    the offset behind it.

    Keys and headers are read past the checksum: they may be asked about, never trusted. Where they
    can't be read they are empty.

    Args:
        connection: How to reach the broker.
        settings: Of the reader that met the batch.
        topic: Where it lies.
        partition: Where it lies.
        first: Its first offset.
        high: Where the partition ends.
    Raises:
        BrokerUnavailable: The broker did not answer within the request timeout.
    """
    name = f"relax.{connection.client_id}.reader"
    alone = {**settings, "enable_partition_eof": True}
    checking = Consumer(connection.settings(group_id=name, **alone))
    try:
        stop = _Probe(
            checking, TopicPartition(topic, partition, first), connection.request_timeout_seconds
        ).end(high)
    finally:
        checking.close()
    trusting = Consumer(connection.settings(group_id=name, **{**alone, "check_crcs": False}))
    try:
        named = _named(trusting, TopicPartition(topic, partition, first), stop)
    finally:
        trusting.close()
    blank = Record(topic, partition, first, "", b"", {}, 0, is_damaged=True)
    return [named.get(offset, replace(blank, offset=offset)) for offset in range(first, stop)], stop


class _Probe:
    """Tells which offsets a damaged batch spans: a fetch at any of them meets the same error."""

    def __init__(self, consumer: Any, place: TopicPartition, timeout_seconds: float) -> None:
        self._consumer, self._place, self._timeout_seconds = consumer, place, timeout_seconds

    def end(self, high: int) -> int:
        """Return the offset behind the batch, `high` at the most."""
        inside, width = self._place.offset, 1
        while (outside := min(inside + width, high)) < high and self._spans(outside):
            inside, width = outside, width * 2
        while outside - inside > 1:
            middle = (inside + outside) // 2
            inside, outside = (middle, outside) if self._spans(middle) else (inside, middle)
        return max(outside, self._place.offset + 1)

    def _spans(self, offset: int) -> bool:
        place = TopicPartition(self._place.topic, self._place.partition, offset)
        self._consumer.assign([place])
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
                    message.offset() == self._place.offset
                )  # else it is the first offset of a second damaged batch
            self._consumer.assign([place])  # what the last look has misread ends this one too
        raise BrokerUnavailable(
            f"looking at {self._place.topic}[{self._place.partition}]@{offset} got no "
            "answer; see that the broker runs"
        )


def _named(consumer: Any, place: TopicPartition, stop: int) -> dict[int, Record]:
    """Read as much of keys and headers as can be read."""
    consumer.assign([place])
    found: dict[int, Record] = {}
    deadline = Deadline(KEYS_SECONDS)
    while not deadline.passed:
        message = consumer.poll(POLL_SECONDS)
        if message is None:
            continue
        if message.error() is not None or message.offset() >= stop:
            break
        found[message.offset()] = replace(Record.of(message), value=b"", is_damaged=True)
    return found
