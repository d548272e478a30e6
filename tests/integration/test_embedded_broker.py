"""The embedded broker with a real Kafka: lifecycle, crash, and the Kafka features that the pipeline
relies on.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from confluent_kafka import (
    Consumer,
    ConsumerGroupTopicPartitions,
    KafkaError,
    Message,
    Producer,
    ShareConsumer,
    TopicPartition,
)
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
)

from relax_events.config import BrokerConfig
from relax_events.errors import EnvironmentProblem
from relax_events.kafka.connection import Connection
from relax_events.kafka.embedded import EmbeddedBroker
from relax_events.kafka.embedded.jars import locate_cache, read_jar_lock
from relax_events.kafka.log_reader import LogReader

TIMEOUT_SECONDS = 100.0


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(tmp_path_factory.mktemp("node"), has_password=False) as running:
        yield running


@pytest.fixture
def admin(broker: EmbeddedBroker) -> AdminClient:
    return AdminClient({"bootstrap.servers": broker.bootstrap_servers})


def make_topic(admin: AdminClient, name: str, *, num_partitions: int = 1) -> str:
    admin.create_topics([NewTopic(name, num_partitions, 1)], request_timeout=TIMEOUT_SECONDS)[
        name
    ].result(TIMEOUT_SECONDS)
    return name


def configure_group(admin: AdminClient, name: str, **settings: str) -> None:
    entries = [
        ConfigEntry(key.replace("_", "."), value, incremental_operation=AlterConfigOpType.SET)
        for key, value in settings.items()
    ]
    resource = ConfigResource(ConfigResource.Type.GROUP, name, incremental_configs=entries)
    admin.incremental_alter_configs([resource])[resource].result(TIMEOUT_SECONDS)


def produce(broker: EmbeddedBroker, topic: str, values: list[bytes], **settings: str | int) -> None:
    producer = Producer(
        {"bootstrap.servers": broker.bootstrap_servers, "enable.idempotence": True, **settings}
    )
    for value in values:
        producer.produce(topic, value)
    assert producer.flush(TIMEOUT_SECONDS) == 0


def consume(
    broker: EmbeddedBroker, topic: str, num_records: int, **settings: str | int
) -> list[Message]:
    """Read a topic from its beginning in a KIP-848 group."""
    consumer = Consumer(
        {
            "bootstrap.servers": broker.bootstrap_servers,
            "group.id": f"{topic}-readers",
            "group.protocol": "consumer",
            "auto.offset.reset": "earliest",
            "fetch.message.max.bytes": 70 << 20,
            "receive.message.max.bytes": 128 << 20,
            **settings,
        }
    )
    try:
        consumer.subscribe([topic])
        messages: list[Message] = []
        while len(messages) < num_records:
            received = consumer.consume(num_records - len(messages), timeout=TIMEOUT_SECONDS)
            assert received, (
                f"{len(messages)} of {num_records} records came within {TIMEOUT_SECONDS} s"
            )
            assert all(message.error() is None for message in received)
            messages += received
        return messages
    finally:
        consumer.close()


@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_compressed_records_are_read_back_unchanged(
    broker: EmbeddedBroker, admin: AdminClient, codec: str
) -> None:
    topic = make_topic(admin, f"codec-{codec}")
    values = [f"record {index} ".encode() * 50 for index in range(200)]
    produce(broker, topic, values, **{"compression.type": codec})
    assert [message.value() for message in consume(broker, topic, 200)] == values


def test_records_carry_the_log_append_time(broker: EmbeddedBroker, admin: AdminClient) -> None:
    topic = make_topic(admin, "append-time")
    produce(broker, topic, [b"x"])
    kind, _ = consume(broker, topic, 1)[0].timestamp()
    assert kind == 2


def test_a_record_of_sixty_mebibytes_passes(broker: EmbeddedBroker, admin: AdminClient) -> None:
    topic = make_topic(admin, "large")
    value = bytes(60 << 20)
    produce(broker, topic, [value], **{"message.max.bytes": 64 << 20})
    assert consume(broker, topic, 1)[0].value() == value


def test_broker_does_not_create_topics_automatically(broker: EmbeddedBroker) -> None:
    producer = Producer(
        {
            "bootstrap.servers": broker.bootstrap_servers,
            "topic.metadata.propagation.max.ms": 100,
            "message.timeout.ms": 5000,
        }
    )
    reports: list[KafkaError | None] = []
    producer.produce(
        "never-declared", b"x", on_delivery=lambda error, message: reports.append(error)
    )
    assert producer.flush(TIMEOUT_SECONDS) == 0
    assert [error.code() for error in reports if error] == [KafkaError.UNKNOWN_TOPIC_OR_PART]


def test_transactions_hide_aborted_records_and_commit_offsets(
    broker: EmbeddedBroker, admin: AdminClient
) -> None:
    source, sink = make_topic(admin, "tx-source"), make_topic(admin, "tx-sink")
    produce(broker, source, [b"in"] * 3)
    consumer = Consumer(
        {
            "bootstrap.servers": broker.bootstrap_servers,
            "group.id": "tx-group",
            "group.protocol": "consumer",
        }
    )
    producer = Producer(
        {"bootstrap.servers": broker.bootstrap_servers, "transactional.id": "tx-trainer"}
    )
    producer.init_transactions(TIMEOUT_SECONDS)
    producer.begin_transaction()
    producer.produce(sink, b"aborted")
    producer.flush(TIMEOUT_SECONDS)
    producer.abort_transaction(TIMEOUT_SECONDS)
    producer.begin_transaction()
    producer.produce(sink, b"committed")
    producer.send_offsets_to_transaction(
        [TopicPartition(source, 0, 3)], consumer.consumer_group_metadata(), TIMEOUT_SECONDS
    )
    producer.commit_transaction(TIMEOUT_SECONDS)
    consumer.close()
    assert [
        message.value()
        for message in consume(broker, sink, 1, **{"isolation.level": "read_committed"})
    ] == [b"committed"]
    request = ConsumerGroupTopicPartitions("tx-group", [TopicPartition(source, 0)])
    answer = admin.list_consumer_group_offsets([request])["tx-group"].result(TIMEOUT_SECONDS)
    assert [partition.offset for partition in answer.topic_partitions] == [3]


def test_share_group_delivers_each_record_and_accepts_a_long_lock_duration(
    broker: EmbeddedBroker, admin: AdminClient
) -> None:
    topic = make_topic(admin, "work")
    configure_group(
        admin,
        "workers",
        share_record_lock_duration_ms="3600000",
        share_auto_offset_reset="earliest",
    )
    produce(broker, topic, [b"a", b"b"], **{"batch.num.messages": 1})
    consumer = ShareConsumer({"bootstrap.servers": broker.bootstrap_servers, "group.id": "workers"})
    try:
        consumer.subscribe([topic])
        values: list[bytes | None] = []
        while len(values) < 2:
            received = consumer.poll(timeout=TIMEOUT_SECONDS)
            assert received, f"{len(values)} of 2 records came"
            values += [message.value() for message in received]
        assert sorted(value or b"" for value in values) == [b"a", b"b"]
    finally:
        consumer.close()


def test_broker_accepts_short_consumer_session_timeouts(
    broker: EmbeddedBroker, admin: AdminClient
) -> None:
    configure_group(
        admin, "quick", consumer_session_timeout_ms="3000", consumer_heartbeat_interval_ms="100"
    )


def test_start_attaches_when_the_broker_runs(broker: EmbeddedBroker) -> None:
    with EmbeddedBroker(broker.directory) as second:
        assert second.pid == broker.pid
        assert second.bootstrap_servers == broker.bootstrap_servers
    assert broker.is_running


def test_start_refuses_another_port_when_the_broker_runs(broker: EmbeddedBroker) -> None:
    port = int(broker.bootstrap_servers.rpartition(":")[2])
    with pytest.raises(EnvironmentProblem, match=f"runs on port {port}, not 19999; stop it first"):
        EmbeddedBroker(broker.directory, port=19_999).start()


def test_records_and_port_survive_when_the_broker_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LC_ALL", "C")  # in which Java can't name the folder
    broker = EmbeddedBroker(tmp_path / "a folder: caf\u00e9", has_password=False)
    try:
        broker.start()
        before = broker.bootstrap_servers
        admin = AdminClient({"bootstrap.servers": before})
        topic = make_topic(admin, "kept")
        producer = Producer({"bootstrap.servers": before, "enable.idempotence": True})
        producer.produce(topic, b"acknowledged before the crash")
        assert producer.flush(TIMEOUT_SECONDS) == 0
        first_pid = broker.pid
        broker.kill()
        assert not broker.is_running
        producer.produce(topic, b"sent into the crash")
        broker.start()
        assert broker.bootstrap_servers == before
        assert broker.pid != first_pid
        assert producer.flush(TIMEOUT_SECONDS) == 0
        assert [message.value() for message in consume(broker, topic, 2)] == [
            b"acknowledged before the crash",
            b"sent into the crash",
        ]
        broker.stop()
        broker.start()
        connection = Connection.from_config(
            BrokerConfig(bootstrap_servers=before), client_id="offsets-only"
        )
        reader = LogReader(connection)  # it waits where the leader is not elected yet
        assert reader.watermarks(topic, 0) == (0, 2)
        reader.close()
    finally:
        broker.stop()
    assert broker.pid is None


def test_a_start_does_not_fail_when_the_class_archive_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a JVM's archive at all: the runtime continues without."""
    cache = locate_cache(read_jar_lock())
    target = tmp_path / "cache" / "relax-events" / cache.name
    target.mkdir(parents=True)
    for jar in cache.glob("*.jar"):
        (target / jar.name).symlink_to(jar)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    damaged = EmbeddedBroker(tmp_path / "node")
    with damaged:
        drafts = [
            Path(word).name for word in psutil.Process(damaged.pid).cmdline() if "/classes-" in word
        ]
    assert len(drafts) == 1, "a first start writes an archive at its end, if it has the time"
    (target / drafts[0].split(".")[0]).with_suffix(".jsa").write_bytes(b"damaged" * 1000)
    with damaged:
        assert damaged.is_running


def test_commands_start_show_and_stop_a_broker_that_outlives_them(tmp_path: Path) -> None:
    def relax(*words: str) -> subprocess.CompletedProcess[str]:
        code = "import sys; from relax_events.cli.broker import app; app(sys.argv[1:])"
        command = [sys.executable, "-c", code, *words, "--directory", str(tmp_path / "node")]
        return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)

    try:
        started = relax("start")
        assert started.returncode == 0, started.stderr
        report = json.loads(relax("status", "--output", "json").stdout)
        assert report["running"] is True
        assert report["bootstrap_servers"] == started.stdout.strip()
        assert report["uptime_seconds"] < 90
        assert report["disk_bytes"] > 0
        assert "controller" in relax("status", "--lines", "5").stdout
    finally:
        stopped = relax("stop")
    assert stopped.returncode == 0, stopped.stderr
    assert relax("status").returncode == 3
