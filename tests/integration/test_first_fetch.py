"""How soon a member of a consumer group receives the first record of a partition that was just
assigned to it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from broker_steps import turn_until

from relax_events.kafka.connection import Connection
from relax_events.kafka.consumer import SubscribedConsumer
from relax_events.kafka.producer import RecordProducer
from relax_events.kafka.records import ProducerRecord

NUM_PARTITIONS = 6
EMPTY_FETCH_SECONDS = 0.5


def test_first_record_of_an_assigned_partition_waits_for_no_fetch_of_the_others(
    connection: Connection,
    producer: RecordProducer,
    make_topic: Callable[..., str],
    make_group: Callable[[str], str],
) -> None:
    """The client adds partitions to its fetches one by one, so a rare one still waits."""
    producer.write([ProducerRecord(make_topic("warm"), b"x")])

    def measure(index: int) -> float:
        topic, group = make_topic(f"work-{index}", NUM_PARTITIONS), make_group(f"reward-{index}")
        member = SubscribedConsumer(connection, consumer_group=group, topics=[topic])
        turn_until(
            lambda: len(member.positions) == NUM_PARTITIONS,
            lambda: member.fetch(timeout_seconds=0.05),
        )
        began = time.monotonic()
        producer.write([ProducerRecord(topic, b"first", partition=0)])
        turn_until(
            lambda: member.positions[topic, 0] == 1, lambda: member.fetch(timeout_seconds=0.05)
        )
        seconds = time.monotonic() - began
        member.close()
        return seconds

    assert statistics.median(measure(index) for index in range(5)) < EMPTY_FETCH_SECONDS / 2
