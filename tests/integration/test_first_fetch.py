"""How soon a consumer receives the first record of a partition that it has just begun to read, and
how few requests an idle one sends.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from broker_steps import turn_until

from relax_events.kafka.base_consumer import BaseConsumer
from relax_events.kafka.connection import Connection
from relax_events.kafka.consumer import SubscribedConsumer
from relax_events.kafka.log_reader import LogReader
from relax_events.kafka.producer import RecordProducer
from relax_events.kafka.records import ProducerRecord

NUM_PARTITIONS = 6
EMPTY_FETCH_MS = 500
Open = Callable[[Connection, str, str], BaseConsumer]


def open_member(connection: Connection, group: str, topic: str) -> BaseConsumer:
    """Join a consumer group."""
    return SubscribedConsumer(connection, consumer_group=group, topics=[topic])


def open_reader(connection: Connection, _: str, topic: str) -> BaseConsumer:
    """Assign all partitions."""
    start = {(topic, partition): 0 for partition in range(NUM_PARTITIONS)}
    return LogReader(connection, start=start, fetch_wait_ms=EMPTY_FETCH_MS)


@pytest.mark.parametrize("open_consumer", [open_member, open_reader])
def test_first_record_of_an_assigned_partition_waits_for_no_fetch_of_the_others(
    open_consumer: Open,
    connection: Connection,
    producer: RecordProducer,
    make_topic: Callable[..., str],
    make_group: Callable[[str], str],
) -> None:
    """The client adds partitions to its fetches one by one, so a rare one still waits."""
    producer.write([ProducerRecord(make_topic("warm"), b"x")])

    def measure(index: int) -> float:
        topic, group = make_topic(f"work-{index}", NUM_PARTITIONS), make_group(f"reward-{index}")
        consumer = open_consumer(connection, group, topic)
        turn_until(
            lambda: len(consumer.positions) == NUM_PARTITIONS,
            lambda: consumer.fetch(timeout_seconds=0.05),
        )
        began = time.monotonic()
        producer.write([ProducerRecord(topic, b"first", partition=0)])
        turn_until(
            lambda: consumer.positions[topic, 0] == 1, lambda: consumer.fetch(timeout_seconds=0.05)
        )
        seconds = time.monotonic() - began
        consumer.close()
        return seconds

    assert statistics.median(measure(index) for index in range(5)) < EMPTY_FETCH_MS / 2000


class Counted:
    """A client whose requests are counted by name."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        self.calls[name] += 1
        return getattr(self._client, name)


def test_idle_member_looks_for_unread_records_in_two_requests(
    connection: Connection,
    producer: RecordProducer,
    make_topic: Callable[..., str],
    make_group: Callable[[str], str],
) -> None:
    """Each request waits behind the client's fetch, and the work loop waits for it: a request for
    each partition kept a member of 24 partitions silent for 12 s."""
    topic = make_topic("work", NUM_PARTITIONS)
    member = SubscribedConsumer(connection, consumer_group=make_group("reward"), topics=[topic])
    turn_until(
        lambda: len(member.positions) == NUM_PARTITIONS,
        lambda: member.fetch(timeout_seconds=0.05),
    )
    member.pause()
    member._consumer = counted = Counted(member._consumer)
    assert member._find_unread() == {}
    producer.write([ProducerRecord(topic, b"x", partition=at) for at in (1, 4, 4)])
    assert member._find_unread() == {(topic, 1): 0, (topic, 4): 0}
    assert counted.calls == {"offsets_for_times": 3}
    member.close()
