"""What a consumer looks up in one request: the beginnings of partitions that it begins to read, and
the unread records of an idle one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import Any, ClassVar

import pytest
from broker_steps import turn_until
from confluent_kafka import Consumer
from confluent_kafka import TopicPartition as ClientPartition

from relax_events.events.parts import TopicOffset
from relax_events.kafka import consumer, log_reader
from relax_events.kafka.admin import Admin
from relax_events.kafka.base_consumer import BaseConsumer
from relax_events.kafka.connection import Connection
from relax_events.kafka.consumer import SubscribedConsumer
from relax_events.kafka.log_reader import LogReader
from relax_events.kafka.producer import RecordProducer
from relax_events.kafka.records import ProducerRecord
from relax_events.topics.partitions import TopicPartition

NUM_PARTITIONS = 6
Open = Callable[[Connection, str, str], BaseConsumer]


def open_member(connection: Connection, group: str, topic: str) -> BaseConsumer:
    """Join a consumer group."""
    return SubscribedConsumer(connection, consumer_group=group, topics=[topic])


def open_reader(connection: Connection, _: str, topic: str) -> BaseConsumer:
    """Assign all partitions."""
    start = {(topic, partition): 0 for partition in range(NUM_PARTITIONS)}
    return LogReader(connection, start=start)


class RecordingConsumer(Consumer):
    """A client that keeps the offsets at which it was made to read."""

    starts: ClassVar[dict[TopicPartition, int]]

    def assign(self, partitions: list[ClientPartition], *arguments: Any) -> None:
        self.record(partitions)
        super().assign(partitions, *arguments)

    def incremental_assign(self, partitions: list[ClientPartition]) -> None:
        self.record(partitions)
        super().incremental_assign(partitions)

    def record(self, partitions: list[ClientPartition]) -> None:
        """Keep the offsets of an assignment."""
        self.starts.update({(at.topic, at.partition): at.offset for at in partitions})


@pytest.mark.parametrize(
    ("open_consumer", "module"), [(open_member, consumer), (open_reader, log_reader)]
)
def test_client_looks_up_no_beginning_behind_a_fetch_of_other_partitions(
    open_consumer: Open,
    module: ModuleType,
    connection: Connection,
    admin: Admin,
    producer: RecordProducer,
    make_topic: Callable[..., str],
    make_group: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client that gets a partition without its beginning looks that up behind its fetch of the
    others: half a second where nothing is written."""
    topic = make_topic("work", NUM_PARTITIONS)
    producer.write([ProducerRecord(topic, b"old", partition=at) for at in (1, 4, 4)])
    admin.delete_records([TopicOffset(topic, 1, 1), TopicOffset(topic, 4, 2)])
    monkeypatch.setattr(RecordingConsumer, "starts", {}, raising=False)
    monkeypatch.setattr(module, "Consumer", RecordingConsumer)

    opened = open_consumer(connection, make_group("reward"), topic)
    turn_until(
        lambda: len(opened.positions) == NUM_PARTITIONS, lambda: opened.fetch(timeout_seconds=0.05)
    )
    assert RecordingConsumer.starts == {
        (topic, at): {1: 1, 4: 2}.get(at, 0) for at in range(NUM_PARTITIONS)
    }
    producer.write([ProducerRecord(topic, b"first", partition=4)])
    turn_until(lambda: opened.positions[topic, 4] == 3, lambda: opened.fetch(timeout_seconds=0.05))
    opened.close()


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
