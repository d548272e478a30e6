"""The admin client: topics, groups and offsets; and the errors of a producer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from broker_steps import fill, turn_until

from relax_events.config import RunConfig
from relax_events.errors import BrokerError, BrokerRefused, BrokerUnavailable
from relax_events.kafka.admin import Admin
from relax_events.kafka.connection import Connection
from relax_events.kafka.embedded.ports import choose_port
from relax_events.kafka.log_reader import LogReader
from relax_events.kafka.producer import RecordProducer
from relax_events.kafka.records import ProducerRecord
from relax_events.ops.consumer_lag import read_slot_lag
from relax_events.ops.topic_apply import apply_topics
from relax_events.topics import TopicPlan, TopicSpec

MakeTopic = Callable[..., str]


def test_ping_counts_brokers(admin: Admin) -> None:
    assert admin.ping(timeout_seconds=10) >= 1


def test_ping_names_address_and_remedy_when_no_broker_answers() -> None:
    address = f"127.0.0.1:{choose_port()}"
    with pytest.raises(
        BrokerUnavailable,
        match=rf"no broker answered at {address} within 0.3 s; start it, or set broker.bootstrap_servers",
    ):
        Admin(Connection(address)).ping(timeout_seconds=0.3)


def test_apply_creates_the_planned_topics(
    admin: Admin, apply_run: Callable[..., RunConfig]
) -> None:
    broker = {
        "partitions_per_version": 3,
        "prompt_queue": "consumer_group",
        "queue_partitions": 5,
        "compression": "zstd",
    }
    plan = TopicPlan.from_config(apply_run(run={"max_staleness": 2}, broker=broker))
    found = admin.topics(plan.topic(""))
    assert found.keys() == {spec.name for spec in plan.specs()}
    for topic in plan.sample_topics():
        assert (found[topic].num_partitions, found[topic].settings["compression.type"]) == (
            12,
            "zstd",
        )
    assert found[plan.topic("prompt.groups")].num_partitions == 5
    assert found[plan.topic("control.heartbeats.trainer")].settings["cleanup.policy"] == "compact"
    for state in found.values():
        assert (state.settings["message.timestamp.type"], state.replication_factor) == (
            "LogAppendTime",
            1,
        )


def test_apply_changes_nothing_when_it_is_done_again(
    admin: Admin, apply_run: Callable[..., RunConfig]
) -> None:
    assert apply_topics(apply_run(), admin) == []


def test_apply_refuses_another_number_of_partitions(
    admin: Admin, apply_run: Callable[..., RunConfig]
) -> None:
    apply_run(run={"max_staleness": 1})
    with pytest.raises(
        BrokerRefused,
        match=r"has 6 partitions, the plan says 8; keep run.max_staleness and broker.partitions_per_version as they were",
    ):
        apply_run(run={"max_staleness": 2})


def test_create_names_the_remedy_when_there_are_too_few_brokers(admin: Admin, run_id: str) -> None:
    with pytest.raises(
        BrokerRefused,
        match=r"creating topic .*; set broker\.replication_factor to the number of brokers or less",
    ):
        admin.create([TopicSpec(f"{run_id}.wide", 1, 50, "of a test")])


def test_create_leaves_a_topic_as_it_is_when_it_exists(admin: Admin, make_topic: MakeTopic) -> None:
    topic = make_topic("a", 3)
    admin.create([TopicSpec(topic, 9, 1, "of a test")])
    assert admin.topics(topic)[topic].num_partitions == 3


def test_admin_alters_topic_settings_and_deletes_topics(
    admin: Admin, make_topic: MakeTopic
) -> None:
    topic = make_topic("a")
    admin.alter_topic(topic, {"retention.ms": "1234567"})
    turn_until(lambda: admin.topics(topic)[topic].settings["retention.ms"] == "1234567")
    admin.delete([topic])
    turn_until(lambda: admin.topics(topic) == {})


def test_admin_reads_end_offsets_and_committed_offsets(
    admin: Admin, producer: RecordProducer, make_topic: MakeTopic, run_id: str
) -> None:
    topic = make_topic("a", 2)
    fill(producer, topic, [b"x"] * 7)
    assert admin.end_offsets([(topic, 0), (topic, 1)]) == {(topic, 0): 7, (topic, 1): 0}
    assert admin.end_offsets([]) == {}
    assert admin.committed_offsets(f"{run_id}.absent", [(topic, 0)]) == {}


def test_end_offsets_name_a_topic_that_does_not_exist(connection: Connection, run_id: str) -> None:
    impatient = Admin(replace(connection, request_timeout_seconds=2.0))
    with pytest.raises(BrokerError, match=rf"reading the offset of {run_id}.missing\[0\]: "):
        impatient.end_offsets([(f"{run_id}.missing", 0)])


def test_consumer_lag_is_counted_by_slot(
    admin: Admin,
    connection: Connection,
    producer: RecordProducer,
    apply_run: Callable[..., RunConfig],
) -> None:
    from relax_events.events.parts import TopicOffset
    from relax_events.kafka.transactions import TransactionalWriter

    config = apply_run(run={"max_staleness": 0}, broker={"partitions_per_version": 2})
    plan = TopicPlan.from_config(config)
    topic, group = plan.topic("advantage.samples"), plan.consumer_group("trainer")
    for partition, count in enumerate((5, 3, 2, 0)):
        fill(producer, topic, [b"x"] * count, partition=partition)
    reader = LogReader(connection, consumer_group=group)
    writer = TransactionalWriter(connection, transactional_id=plan.transactional_id("trainer"))
    consumed = {0: 4, 1: 1, 2: 2, 3: 0}
    writer.commit(
        [],
        offsets=[TopicOffset(topic, partition, offset) for partition, offset in consumed.items()],
        reader=reader,
    )
    assert read_slot_lag(config, admin) == {"trainer": {0: 3, 1: 0}}
    writer.close()
    reader.close()


def test_producer_waits_for_others_of_a_batch_until_it_is_asked_not_to(
    connection: Connection, make_topic: MakeTopic
) -> None:
    topic, acknowledged = make_topic("a"), threading.Event()
    lingering = RecordProducer(connection, linger_ms=100_000.0)
    lingering.send(ProducerRecord(topic, b"x"), on_acknowledged=acknowledged.set)
    assert not acknowledged.wait(0.5)
    stop = time.monotonic() + 50
    while not acknowledged.is_set():
        assert time.monotonic() < stop, "not acknowledged"
        lingering.end_linger()
        lingering.check()
    lingering.close()


@pytest.mark.parametrize("num_records", [0, 1, 8, 100])
@pytest.mark.parametrize("max_batch_records", [1, 3, 8])
@pytest.mark.parametrize("fewer", [None, 2])
def test_records_of_bounded_batches_are_all_written_in_order(
    connection: Connection,
    make_topic: MakeTopic,
    num_records: int,
    max_batch_records: int,
    fewer: int | None,
) -> None:
    topic = make_topic("a")
    bounded = RecordProducer(connection, linger_ms=100_000.0, max_batch_records=max_batch_records)
    bounded.write(
        (ProducerRecord(topic, str(number).encode()) for number in range(num_records)),
        max_batch_records=fewer,
    )
    bounded.close()
    read = [int(record.value) for record in LogReader(connection).read_to_end([(topic, 0)])]
    assert read == list(range(num_records))


def test_write_is_refused_when_the_record_is_larger_than_the_topic_allows(
    producer: RecordProducer, make_topic: MakeTopic
) -> None:
    topic = make_topic("a", max_message_bytes="1000")
    with pytest.raises(BrokerRefused, match="delivering records: MSG_SIZE_TOO_LARGE"):
        producer.write([ProducerRecord(topic, bytes(5000))])
    producer.write([ProducerRecord(topic, b"small")])


def test_write_is_refused_when_the_record_is_larger_than_the_client_allows(
    producer: RecordProducer, make_topic: MakeTopic
) -> None:
    topic = make_topic("a")
    with pytest.raises(
        BrokerRefused, match=f"writing 67108865 bytes to {topic}: MSG_SIZE_TOO_LARGE"
    ):
        producer.write([ProducerRecord(topic, bytes(64 * 1024**2 + 1))])


def test_write_is_refused_when_the_topic_does_not_exist(
    bootstrap_servers: str, run_id: str
) -> None:
    quick = Connection(bootstrap_servers, client={"topic.metadata.propagation.max.ms": 100})
    with pytest.raises(
        BrokerRefused, match=r"delivering records: (_UNKNOWN_TOPIC|UNKNOWN_TOPIC_OR_PART)"
    ):
        RecordProducer(quick).write([ProducerRecord(f"{run_id}.missing", b"x")])
