"""The leaders that a broker names, and clients that are replaced because they know older ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping

import pytest
from broker_steps import turn_until

from relax_events.errors import ClientFailed
from relax_events.kafka.admin import Admin
from relax_events.kafka.base_consumer import BaseConsumer
from relax_events.kafka.connection import Connection
from relax_events.kafka.consumer import SubscribedConsumer
from relax_events.kafka.leases import Lease
from relax_events.kafka.log_reader import LogReader
from relax_events.kafka.producer import RecordProducer
from relax_events.kafka.protocol import partition_leaders
from relax_events.kafka.protocol.partition_leaders import (
    BrokerMetadata,
    read_metadata,
    read_metadata_of_each,
)
from relax_events.kafka.records import ProducerRecord
from relax_events.kafka.share_leases import ShareGroupLeases
from relax_events.kafka.workarounds import stale_leaders
from relax_events.kafka.workarounds.stale_leaders import LeaderMonitor
from relax_events.topics.partitions import TopicPartition


class Finding:
    """Makes the next check of each monitor find that a partition has another leader."""

    def __init__(self) -> None:
        self.num_found: dict[int, int] = {}
        self.is_hidden = True

    def find(
        self, monitor: LeaderMonitor, known: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, int]:
        monitor._check_at += 0.1
        if self.is_hidden or id(monitor) in self.num_found:
            return {}
        self.num_found[id(monitor)] = 1
        return dict.fromkeys(known, 99)


@pytest.fixture
def finding(monkeypatch: pytest.MonkeyPatch) -> Finding:
    """Return what monitors find from now on, every tenth of a second."""
    made = Finding()
    monkeypatch.setattr(stale_leaders, "CHECK_SECONDS", 0.1)
    monkeypatch.setattr(
        LeaderMonitor,
        "find_newer_leaders",
        lambda monitor, partitions, _: made.find(monitor, dict.fromkeys(partitions, 1)),
    )  # in a cluster of one broker there is no other to ask
    return made


def write(producer: RecordProducer, topic: str, *values: bytes) -> None:
    producer.write([ProducerRecord(topic, value, partition=0) for value in values])


def read_from_the_beginning(
    connection: Connection, topic: str
) -> tuple[LogReader, list[bytes], Callable[[], None]]:
    """Return a reader, the values that it has read, and the call that reads more of them."""
    reader, values = LogReader(connection, start={(topic, 0): 0}), list[bytes]()

    def fetch() -> None:
        values.extend(record.value for record in reader.fetch(timeout_seconds=0.1))

    return reader, values, fetch


def test_broker_names_the_leaders_that_the_admin_client_names(
    connection: Connection, admin: Admin, make_topic: Callable[..., str]
) -> None:
    topics = [make_topic("a", 3), make_topic("b", 1)]
    found = read_metadata(connection, [*topics, "no-such-topic"])
    assert found.addresses == (connection.bootstrap_servers,)
    assert {at: leader.node_id for at, leader in found.leaders.items()} == {
        (state.topic, state.partition): state.leader
        for topic in topics
        for state in admin.partitions(topic)
    }
    assert all(leader.epoch >= 0 for leader in found.leaders.values())
    assert read_metadata_of_each(connection, topics).keys() == {connection.bootstrap_servers}


def test_one_question_to_the_broker_serves_all_clients_of_a_process(
    connection: Connection,
    make_topic: Callable[..., str],
    make_group: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At each check every client opened a connection and logged in, and asked for its topics by its
    own connection too."""
    asked, own_questions = list[frozenset[str]](), list[BaseConsumer]()
    read = partition_leaders.read_metadata

    def count(connection: Connection, topics: Collection[str]) -> BrokerMetadata:
        asked.append(frozenset(topics))
        return read(connection, topics)

    def ask_client(client: BaseConsumer) -> dict[TopicPartition, int]:
        own_questions.append(client)
        return {}

    monkeypatch.setattr(partition_leaders, "read_metadata", count)
    monkeypatch.setattr(BaseConsumer, "_read_known_leaders", ask_client)
    topics = [make_topic("a", 2), make_topic("b"), make_topic("c")]
    starts = {(topic, 0): 0 for topic in topics}
    readers = [LogReader(connection, start=starts) for _ in range(8)]
    members = [
        SubscribedConsumer(connection, consumer_group=make_group("g"), topics=[topic])
        for topic in topics
    ]
    asked.clear()  # a new client looks which brokers are outdated
    for _ in range(3):
        for reader in readers:
            reader._leaders._check_at = 0.0
            reader.fetch(timeout_seconds=0.0)
        for member in members:
            member.positions |= starts
            member._leaders._check_at = 0.0
            member.fetch(1, timeout_seconds=0.0)
    for client in (*readers, *members):
        client.close()
    assert asked == [frozenset(topics)], "all checks lie within the time that an answer serves"
    assert own_questions == []


def test_reader_with_a_new_client_reads_on_where_it_was(
    connection: Connection,
    make_topic: Callable[..., str],
    producer: RecordProducer,
    finding: Finding,
) -> None:
    topic = make_topic("control")
    write(producer, topic, b"0", b"1")
    reader, values, fetch = read_from_the_beginning(connection, topic)
    turn_until(lambda: values == [b"0", b"1"], fetch)
    finding.is_hidden = False
    turn_until(lambda: bool(finding.num_found), fetch)
    write(producer, topic, b"2", b"3")
    turn_until(lambda: len(values) == 4, fetch)
    assert values == [b"0", b"1", b"2", b"3"]
    assert reader.lag() == {(topic, 0): 0}
    reader.close()


def test_reader_that_is_paused_stays_so_with_a_new_client(
    connection: Connection,
    make_topic: Callable[..., str],
    producer: RecordProducer,
    finding: Finding,
) -> None:
    topic = make_topic("control")
    write(producer, topic, b"0")
    reader, values, fetch = read_from_the_beginning(connection, topic)
    turn_until(lambda: values == [b"0"], fetch)
    reader.pause()
    finding.is_hidden = False
    turn_until(lambda: bool(finding.num_found), fetch)
    write(producer, topic, b"1")
    for _ in range(15):
        fetch()
    assert values == [b"0"]
    reader.resume()
    turn_until(lambda: values == [b"0", b"1"], fetch)
    reader.close()


def test_member_that_knows_an_old_leader_ends_its_worker(
    connection: Connection,
    make_topic: Callable[..., str],
    make_group: Callable[[str], str],
    finding: Finding,
) -> None:
    topic = make_topic("samples")
    consumer = SubscribedConsumer(connection, consumer_group=make_group("reward"), topics=[topic])
    turn_until(lambda: bool(consumer.positions), lambda: consumer.fetch(timeout_seconds=0.1))
    finding.is_hidden = False
    with pytest.raises(ClientFailed, match=r"does not find that broker 99 leads .*samples\[0\]"):
        turn_until(lambda: False, lambda: consumer.fetch(timeout_seconds=0.1))
    consumer.close()


def test_share_consumers_rejoin_and_lease_on(
    connection: Connection,
    make_topic: Callable[..., str],
    make_share_group: Callable[[str], str],
    producer: RecordProducer,
    finding: Finding,
) -> None:
    topic = make_topic("prompts")
    values: list[bytes] = []

    def on_lease(lease: Lease) -> None:
        values.append(lease.record.value)
        lease.done()

    leases = ShareGroupLeases(
        connection, group=make_share_group("rollout"), topic=topic, max_leases=2, on_lease=on_lease
    )
    write(producer, topic, b"0")
    turn_until(lambda: values == [b"0"], lambda: time.sleep(0.05))
    before = leases.connection
    finding.is_hidden = False
    turn_until(lambda: leases.connection is not before, lambda: time.sleep(0.05))
    write(producer, topic, b"1")
    turn_until(lambda: values == [b"0", b"1"], lambda: time.sleep(0.05))
    leases.close()
