"""Members of a consumer group share partitions, get the same partitions of all topics, and resume
from committed offsets.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from broker_steps import fetch_until, fill, next_line, other_process, turn_until
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from relax_events.deadline import Deadline
from relax_events.errors import ClientFailed
from relax_events.events.parts import TopicOffset
from relax_events.kafka import consumer as consumers
from relax_events.kafka.admin import Admin
from relax_events.kafka.connection import Connection
from relax_events.kafka.consumer import SubscribedConsumer
from relax_events.kafka.producer import RecordProducer
from relax_events.kafka.records import ProducerRecord, Record
from relax_events.kafka.transactions import TransactionalWriter
from relax_events.kafka.workarounds.silent_members import HeartbeatMonitor

MakeTopic = Callable[..., str]
MakeGroup = Callable[[str], str]

CRASHING_MEMBER = """
import sys
from relax_events.kafka.connection import Connection
from relax_events.kafka.consumer import SubscribedConsumer
from relax_events.deadline import Deadline
from relax_events.events.parts import TopicOffset
bootstrap_servers, group, topic = sys.argv[1:]
consumer = SubscribedConsumer(Connection(bootstrap_servers), consumer_group=group, topics=[topic])
records = []
while len(records) < 10:
    records += consumer.fetch(timeout_seconds=0.2)
consumer.commit([TopicOffset(topic, 0, 4)], wait=Deadline(10))
print(len(records))
sys.stdin.read()
"""


def partitions_of(consumer: SubscribedConsumer, topic: str) -> set[int]:
    return {partition for name, partition in consumer.positions if name == topic}


def test_member_reads_all_records_in_order_when_it_is_alone(
    connection: Connection, producer: RecordProducer, make_topic: MakeTopic, make_group: MakeGroup
) -> None:
    topic = make_topic("work")
    headers = {"policy-version": "7", "note": "caf\u00e9"}
    producer.write(
        [
            ProducerRecord(topic, b"a", key="k", partition=0, headers=headers),
            ProducerRecord(topic, b"b", partition=0),
        ]
    )
    consumer = SubscribedConsumer(connection, consumer_group=make_group("reward"), topics=[topic])
    first, second = fetch_until(consumer, lambda records: len(records) == 2)
    assert (first.value, first.key, first.headers, first.policy_version) == (b"a", "k", headers, 7)
    assert (second.offset, second.key, second.headers, second.policy_version) == (1, "", {}, None)
    assert first.location == f"{topic}[0]@0"
    assert consumer.positions == {(topic, 0): 2}
    consumer.close()


def test_paused_member_fetches_nothing_gives_up_partitions_and_resumes(
    connection: Connection, producer: RecordProducer, make_topic: MakeTopic, make_group: MakeGroup
) -> None:
    topic, group = make_topic("work", 2), make_group("reward")
    paused = SubscribedConsumer(connection, consumer_group=group, topics=[topic])
    turn_until(
        lambda: partitions_of(paused, topic) == {0, 1}, lambda: paused.fetch(timeout_seconds=0.1)
    )
    paused.pause()
    fill(producer, topic, [b"a"] * 3)
    fill(producer, topic, [b"b"] * 3, partition=1)
    other, taken = (
        SubscribedConsumer(connection, consumer_group=group, topics=[topic]),
        list[Record](),
    )

    def turn() -> None:
        assert paused.fetch(timeout_seconds=0.1) == []
        taken.extend(other.fetch(timeout_seconds=0.1))

    turn_until(
        lambda: (
            len(partitions_of(paused, topic)) == len(partitions_of(other, topic)) == 1
            and len(taken) == 3
        ),
        turn,
    )
    other.close()
    turn_until(
        lambda: partitions_of(paused, topic) == {0, 1}, lambda: paused.fetch(timeout_seconds=0.1)
    )
    assert paused.fetch(timeout_seconds=0.5) == [], (
        "a partition that comes while it is paused is paused too"
    )
    paused.resume()
    assert len(fetch_until(paused, lambda records: len(records) == 6)) == 6
    paused.close()


def test_member_lag_counts_records_that_it_has_not_fetched(
    connection: Connection, producer: RecordProducer, make_topic: MakeTopic, make_group: MakeGroup
) -> None:
    topic = make_topic("work", 2)
    fill(producer, topic, [b"x"] * 10)
    fill(producer, topic, [b"x"] * 4, partition=1)
    consumer = SubscribedConsumer(connection, consumer_group=make_group("reward"), topics=[topic])
    assert consumer.lag() == {}
    taken: list[Record] = []
    turn_until(
        lambda: len(taken) >= 3 and len(consumer.lag()) == 2,
        lambda: taken.extend(consumer.fetch(1, timeout_seconds=0.2)),
    )
    unread = {(topic, 0): 10, (topic, 1): 4}
    for record in taken:
        unread[record.topic, record.partition] -= 1
    assert consumer.lag() == unread
    fetch_until(consumer, lambda records: len(taken) + len(records) == 14)
    assert consumer.lag() == {(topic, 0): 0, (topic, 1): 0}
    consumer.close()


def test_client_statistics_show_heartbeats_of_an_idle_member(
    connection: Connection,
    make_topic: MakeTopic,
    make_group: MakeGroup,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    noted: list[tuple[int, float]] = []

    class Seen(HeartbeatMonitor):
        def update(self, statistics: str) -> None:
            super().update(statistics)
            noted.append((self._num_heartbeats, self._silent_seconds))

    monkeypatch.setattr(consumers, "HeartbeatMonitor", Seen)
    consumer = SubscribedConsumer(
        connection, consumer_group=make_group("reward"), topics=[make_topic("work")]
    )
    turn_until(lambda: len(noted) >= 4, lambda: consumer.fetch(timeout_seconds=0.2))
    consumer.close()
    first, *_, last = [count for count, _ in noted if count]
    assert last - first >= 6  # one each 0.5 s or more often, over four seconds or six
    assert all(silent == 0.0 for _, silent in noted)


def test_member_whose_heartbeats_stopped_fails_its_worker(
    connection: Connection,
    make_topic: MakeTopic,
    make_group: MakeGroup,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(HeartbeatMonitor, "is_silent", True)
    group = make_group("reward")
    consumer = SubscribedConsumer(connection, consumer_group=group, topics=[make_topic("work")])
    with pytest.raises(ClientFailed, match=f"heartbeats for {re.escape(group)} have stopped"):
        consumer.fetch(timeout_seconds=0.2)
    consumer.close()


def test_two_members_each_hold_the_same_partitions_of_all_topics(
    connection: Connection, make_topic: MakeTopic, make_group: MakeGroup
) -> None:
    topics = [make_topic("rollout.samples", 4), make_topic("reward.scores", 4)]
    group = make_group("advantage")
    members = [
        SubscribedConsumer(connection, consumer_group=group, topics=topics) for _ in range(2)
    ]

    def is_divided() -> bool:
        return all(len(partitions_of(member, topics[0])) == 2 for member in members) and all(
            len(member.positions) == 4 for member in members
        )

    turn_until(
        is_divided,
        *(lambda member=member: member.fetch(timeout_seconds=0.05) for member in members),
    )
    for member in members:
        assert partitions_of(member, topics[0]) == partitions_of(member, topics[1])
    assert partitions_of(members[0], topics[0]) | partitions_of(members[1], topics[0]) == {
        0,
        1,
        2,
        3,
    }
    for member in members:
        member.close()


def test_member_commits_before_its_partitions_are_revoked(
    connection: Connection, producer: RecordProducer, make_topic: MakeTopic, make_group: MakeGroup
) -> None:
    topic, group = make_topic("work", 2), make_group("reward")
    for partition in range(2):
        fill(producer, topic, [b"x"] * 5, partition=partition)
    revoked: list[TopicOffset] = []

    def give_back(offsets: list[TopicOffset], deadline: Deadline) -> None:
        revoked.extend(offsets)
        first.commit(offsets, wait=deadline)

    first = SubscribedConsumer(
        connection, consumer_group=group, topics=[topic], on_revoked=give_back
    )
    fetch_until(first, lambda records: len(records) == 10)
    assigned: list[TopicOffset] = []
    second = SubscribedConsumer(
        connection, consumer_group=group, topics=[topic], on_assigned=assigned.extend
    )
    turn_until(
        lambda: bool(assigned),
        lambda: first.fetch(timeout_seconds=0.05),
        lambda: second.fetch(timeout_seconds=0.05),
    )
    assert [offset.offset for offset in revoked] == [5]
    assert assigned == revoked
    first.close()
    second.close()


def test_next_member_starts_at_the_commit_when_one_is_killed(
    bootstrap_servers: str,
    connection: Connection,
    producer: RecordProducer,
    make_topic: MakeTopic,
    make_group: MakeGroup,
) -> None:
    topic, group = make_topic("work"), make_group("reward")
    fill(producer, topic, [str(index).encode() for index in range(10)])
    with other_process(CRASHING_MEMBER, bootstrap_servers, group, topic) as member:
        assert next_line(member) == "10"
    consumer = SubscribedConsumer(connection, consumer_group=group, topics=[topic])
    records = fetch_until(consumer, lambda records: len(records) == 6)
    assert [record.value for record in records] == [b"4", b"5", b"6", b"7", b"8", b"9"]
    consumer.close()


def test_asynchronous_commit_survives_the_closing_of_its_member(
    connection: Connection,
    producer: RecordProducer,
    admin: Admin,
    make_topic: MakeTopic,
    make_group: MakeGroup,
) -> None:
    topic, group = make_topic("work"), make_group("reward")
    fill(producer, topic, [b"a", b"b", b"c"])
    consumer = SubscribedConsumer(connection, consumer_group=group, topics=[topic])
    fetch_until(consumer, lambda records: len(records) == 3)
    consumer.commit([TopicOffset(topic, 0, 2)])
    consumer.close()
    assert admin.committed_offsets(group, [(topic, 0)]) == {(topic, 0): 2}


def test_seek_passes_stale_records_without_reading_them(
    connection: Connection, producer: RecordProducer, make_topic: MakeTopic, make_group: MakeGroup
) -> None:
    topic = make_topic("work")
    fill(producer, topic, [str(index).encode() for index in range(100)])
    consumer = SubscribedConsumer(connection, consumer_group=make_group("reward"), topics=[topic])
    fetch_until(consumer, lambda records: len(records) >= 1)
    consumer.seek(topic, 0, 98)
    assert consumer.positions[topic, 0] == 98
    records = fetch_until(consumer, lambda records: bool(records) and records[-1].offset == 99)
    assert [record.offset for record in records] == [98, 99]
    consumer.close()


def test_pause_keeps_the_membership_and_the_records(
    connection: Connection, producer: RecordProducer, make_topic: MakeTopic, make_group: MakeGroup
) -> None:
    topic = make_topic("work")
    consumer = SubscribedConsumer(connection, consumer_group=make_group("reward"), topics=[topic])
    turn_until(lambda: bool(consumer.positions), lambda: consumer.fetch(timeout_seconds=0.05))
    consumer.pause()
    fill(producer, topic, [b"held back"])
    assert consumer.fetch(timeout_seconds=0.5) == []
    consumer.resume()
    assert [record.value for record in fetch_until(consumer, bool)] == [b"held back"]
    consumer.close()


class BusyCoordinator:
    """A client whose coordinator answers the second request."""

    def __init__(self) -> None:
        self.failures = [KafkaException(KafkaError(KafkaError._TIMED_OUT))]

    def committed(
        self, partitions: list[TopicPartition], *, timeout: float
    ) -> list[TopicPartition]:
        if self.failures:
            raise self.failures.pop()
        return [TopicPartition(partition.topic, partition.partition, 7) for partition in partitions]


def test_member_retries_reading_committed_offsets_from_a_busy_coordinator(
    connection: Connection, make_topic: MakeTopic, make_group: MakeGroup
) -> None:
    topic = make_topic("work")
    consumer = SubscribedConsumer(connection, consumer_group=make_group("reward"), topics=[topic])
    (committed,) = consumer._read_committed(BusyCoordinator(), [TopicPartition(topic, 0)])
    assert committed.offset == 7
    consumer.close()


def test_client_that_stops_fetching_one_of_its_partitions_fails(
    connection: Connection,
    producer: RecordProducer,
    make_topic: MakeTopic,
    make_group: MakeGroup,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("relax_events.kafka.workarounds.lost_assignments.CHECK_SECONDS", 0.3)
    topic = make_topic("work", 2)
    consumer = SubscribedConsumer(connection, consumer_group=make_group("reward"), topics=[topic])
    turn_until(lambda: len(consumer.positions) == 2, lambda: consumer.fetch(timeout_seconds=0.1))
    consumer._consumer.pause(
        [TopicPartition(topic, 1)]
    )  # behind our back, so that the client behaves as one that has lost it
    fill(producer, topic, [b"comes"])
    fill(producer, topic, [b"lies"], partition=1)
    assert [
        record.value for record in fetch_until(consumer, lambda records: len(records) == 1)
    ] == [b"comes"]
    with pytest.raises(ClientFailed, match=re.escape(f"does not fetch the record at {topic}[1]@0")):
        turn_until(lambda: False, lambda: consumer.fetch(timeout_seconds=0.1))
    consumer.close()


def test_transaction_markers_do_not_count_as_a_stalled_fetch(
    connection: Connection,
    make_topic: MakeTopic,
    make_group: MakeGroup,
    run_id: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("relax_events.kafka.workarounds.lost_assignments.CHECK_SECONDS", 0.1)
    topic = make_topic("work")
    writer = TransactionalWriter(connection, transactional_id=f"{run_id}.marks")
    consumer = SubscribedConsumer(connection, consumer_group=make_group("reward"), topics=[topic])
    looks = []
    monkeypatch.setattr(
        consumer,
        "_check_fetch_stalled",
        lambda unread: (
            looks.append(dict(unread)) or SubscribedConsumer._check_fetch_stalled(consumer, unread)
        ),
    )
    writer.commit([ProducerRecord(topic, b"comes", partition=0)])
    turn_until(lambda: bool(looks), lambda: consumer.fetch(timeout_seconds=0.1))
    assert looks == [{(topic, 0): 1}]
    consumer.close()


def test_paused_client_does_not_count_as_stalled(
    connection: Connection,
    producer: RecordProducer,
    make_topic: MakeTopic,
    make_group: MakeGroup,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("relax_events.kafka.workarounds.lost_assignments.CHECK_SECONDS", 0.1)
    topic = make_topic("work")
    consumer = SubscribedConsumer(connection, consumer_group=make_group("reward"), topics=[topic])
    turn_until(lambda: len(consumer.positions) == 1, lambda: consumer.fetch(timeout_seconds=0.1))
    consumer.pause()
    fill(producer, topic, [b"waits"])
    for _ in range(10):
        assert consumer.fetch(timeout_seconds=0.15) == []
    consumer.resume()
    assert [
        record.value for record in fetch_until(consumer, lambda records: len(records) == 1)
    ] == [b"waits"]
    consumer.close()
