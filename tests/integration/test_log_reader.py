"""Readers with positions of their own: to the end, exactly the given records, and over a truncated
log.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import structlog.testing
from broker_steps import fetch_until, fill
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from relax_events.deadline import Deadline
from relax_events.errors import BrokerError
from relax_events.events.parts import TopicOffset
from relax_events.kafka.connection import Connection
from relax_events.kafka.consumer import SubscribedConsumer
from relax_events.kafka.log_reader import LogReader
from relax_events.kafka.producer import RecordProducer
from relax_events.kafka.records import ProducerRecord
from relax_events.kafka.transactions import TransactionalWriter

MakeTopic = Callable[..., str]


@pytest.fixture
def reader(connection: Connection) -> LogReader:
    return LogReader(connection)


def numbered(count: int, start: int = 0) -> list[bytes]:
    return [str(index).encode() for index in range(start, start + count)]


def purge(connection: Connection, topic: str, *, below: int) -> None:
    client = AdminClient({"bootstrap.servers": connection.bootstrap_servers})
    for future in client.delete_records([TopicPartition(topic, 0, below)]).values():
        future.result(10)


def test_read_to_end_returns_all_partitions_each_in_order(
    reader: LogReader, producer: RecordProducer, make_topic: MakeTopic
) -> None:
    topic, empty = make_topic("a", 2), make_topic("b")
    fill(producer, topic, numbered(3000))
    fill(producer, topic, numbered(5), partition=1)
    records = reader.read_to_end([(topic, 0), (topic, 1), (empty, 0)])
    assert [record.value for record in records if record.partition == 0] == numbered(3000)
    assert [record.value for record in records if record.partition == 1] == numbered(5)
    assert len(records) == 3005
    reader.close()


def test_lag_counts_from_the_assigned_offset_or_the_oldest_remaining_record(
    connection: Connection, reader: LogReader, producer: RecordProducer, make_topic: MakeTopic
) -> None:
    topic, purged = make_topic("a"), make_topic("b")
    fill(producer, topic, numbered(10))
    fill(producer, purged, numbered(10))
    purge(connection, purged, below=7)
    reader.assign({(topic, 0): 4, (purged, 0): 0})
    records = fetch_until(reader, lambda records: len(records) == 9)
    assert {topic: record.offset for record in records for topic in [record.topic]} == {
        topic: 9,
        purged: 9,
    }
    assert reader.lag() == {(topic, 0): 0, (purged, 0): 0}
    reader.assign({(topic, 0): 4})
    fetch_until(reader, lambda records: len(reader.lag()) == 1)
    reader.seek(topic, 0, 3)
    assert reader.lag() == {(topic, 0): 7}
    reader.close()


def test_reader_can_seek_while_the_client_changes_its_assignment(
    reader: LogReader, producer: RecordProducer, make_topic: MakeTopic
) -> None:
    topic, other = make_topic("a"), make_topic("b")
    for name in (topic, other):
        fill(producer, name, numbered(10))
    for _ in range(100):  # the client refuses to seek one time in fifteen
        reader.assign({(topic, 0): 4, (other, 0): 0})
        reader.fetch(max_records=100, timeout_seconds=0.02)
        reader.assign({(topic, 0): 4})
        reader.seek(topic, 0, 3)
    records = fetch_until(reader, lambda records: bool(records) and records[-1].offset == 9)
    assert [record.offset for record in records][-7:] == list(range(3, 10))
    reader.close()


def test_read_to_end_starts_at_the_given_offset(
    reader: LogReader, producer: RecordProducer, make_topic: MakeTopic
) -> None:
    topic = make_topic("a")
    fill(producer, topic, numbered(10))
    assert [
        record.offset for record in reader.read_to_end([(topic, 0)], from_offsets={(topic, 0): 8})
    ] == [8, 9]
    assert reader.read_to_end([(topic, 0)], from_offsets={(topic, 0): 10}) == []
    reader.close()


def test_read_to_end_returns_only_committed_records_of_transactions(
    reader: LogReader,
    connection: Connection,
    producer: RecordProducer,
    make_topic: MakeTopic,
    run_id: str,
) -> None:
    """The log ends with a marker, which is an offset without a record."""
    topic = make_topic("a")
    writer = TransactionalWriter(connection, transactional_id=f"{run_id}.trainer.0")
    writer.commit([ProducerRecord(topic, b"committed")])
    abort_one(connection, topic, f"{run_id}.other")
    assert [record.value for record in reader.read_to_end([(topic, 0)])] == [b"committed"]
    assert reader.watermarks(topic, 0) == (0, 4)
    writer.close()
    reader.close()


def abort_one(connection: Connection, topic: str, transactional_id: str) -> None:
    other = Producer(
        {"bootstrap.servers": connection.bootstrap_servers, "transactional.id": transactional_id}
    )
    other.init_transactions(10)
    other.begin_transaction()
    other.produce(topic, b"aborted")
    other.flush(10)
    other.abort_transaction(10)


def test_read_to_end_stops_before_a_transaction_that_is_open(
    reader: LogReader,
    connection: Connection,
    producer: RecordProducer,
    make_topic: MakeTopic,
    run_id: str,
) -> None:
    topic = make_topic("a")
    fill(producer, topic, [b"before"])
    other = Producer(
        {"bootstrap.servers": connection.bootstrap_servers, "transactional.id": f"{run_id}.open"}
    )
    other.init_transactions(10)
    other.begin_transaction()
    other.produce(topic, b"open")
    other.flush(10)
    assert [record.value for record in reader.read_to_end([(topic, 0)])] == [b"before"]
    other.abort_transaction(10)
    reader.close()


def test_read_exactly_returns_the_wanted_records(
    reader: LogReader, producer: RecordProducer, make_topic: MakeTopic
) -> None:
    topic = make_topic("a", 2)
    for partition in range(2):
        fill(producer, topic, numbered(50), partition=partition)
    locations = {(0, 0), (0, 49), (1, 17), (1, 18)}
    found = reader.read_at(topic, locations)
    assert found.keys() == locations
    assert {location: record.value for location, record in found.items()} == {
        (0, 0): b"0",
        (0, 49): b"49",
        (1, 17): b"17",
        (1, 18): b"18",
    }
    assert reader.read_at(topic, set()) == {}
    reader.close()


def test_read_exactly_fails_immediately_when_a_record_was_purged(
    reader: LogReader, connection: Connection, producer: RecordProducer, make_topic: MakeTopic
) -> None:
    topic = make_topic("a")
    fill(producer, topic, numbered(10))
    purge(connection, topic, below=4)
    with pytest.raises(
        BrokerError, match=rf"record {topic}\[0\]@3 was purged: the log begins at 4"
    ):
        reader.read_at(topic, {(0, 3), (0, 5)})
    reader.close()


def test_read_exactly_fails_immediately_when_a_record_was_never_written(
    reader: LogReader, producer: RecordProducer, make_topic: MakeTopic
) -> None:
    topic = make_topic("a")
    fill(producer, topic, numbered(2))
    with pytest.raises(
        BrokerError, match=rf"record {topic}\[0\]@2 does not exist: the log ends at 2"
    ):
        reader.read_at(topic, {(0, 1), (0, 2)})
    reader.close()


def test_reader_continues_at_the_oldest_record_when_earlier_ones_were_purged(
    connection: Connection, producer: RecordProducer, make_topic: MakeTopic
) -> None:
    topic = make_topic("a")
    fill(producer, topic, numbered(10))
    purge(connection, topic, below=6)
    reader = LogReader(connection)
    reader.assign({(topic, 0): 3})
    with structlog.testing.capture_logs() as logs:
        records = fetch_until(reader, lambda records: len(records) == 4)
    assert [record.offset for record in records] == [6, 7, 8, 9]
    assert [(entry["event"], entry["resumed_at"]) for entry in logs] == [("log.truncated", 6)]
    assert [
        record.offset for record in reader.read_to_end([(topic, 0)], from_offsets={(topic, 0): 2})
    ] == [6, 7, 8, 9]
    reader.close()


def test_group_member_continues_at_oldest_record_when_its_offset_was_purged(
    connection: Connection,
    producer: RecordProducer,
    make_topic: MakeTopic,
    make_group: Callable[[str], str],
) -> None:
    topic, group = make_topic("a"), make_group("reward")
    fill(producer, topic, numbered(10))
    earlier = SubscribedConsumer(connection, consumer_group=group, topics=[topic])
    fetch_until(earlier, bool)
    earlier.commit([TopicOffset(topic, 0, 2)], wait=Deadline(10))
    earlier.close()
    purge(connection, topic, below=7)
    consumer = SubscribedConsumer(connection, consumer_group=group, topics=[topic])
    records = fetch_until(consumer, lambda records: len(records) == 3)
    assert [record.offset for record in records] == [7, 8, 9]
    assert consumer.positions == {(topic, 0): 10}
    consumer.close()


def test_fetch_bounds_the_number_of_records(
    connection: Connection, producer: RecordProducer, make_topic: MakeTopic
) -> None:
    topic = make_topic("a")
    fill(producer, topic, numbered(50))
    reader = LogReader(connection, start={(topic, 0): 0})
    sizes: list[int] = []
    while sum(sizes) < 50:
        sizes.append(len(reader.fetch(7, timeout_seconds=5)))
    assert max(sizes) <= 7
    reader.close()
