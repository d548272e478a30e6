"""The shipped list of jars."""

import re

from relax_events.kafka.embedded.jars import read_jar_lock


def test_jar_lock_contains_broker_client_and_logging_jars() -> None:
    lock = read_jar_lock()
    names = {jar.name for jar in lock.jars}
    assert f"kafka_2.13-{lock.kafka_version}.jar" in names
    assert f"kafka-clients-{lock.kafka_version}.jar" in names
    assert any(name.startswith("hash4j-") for name in names)
    assert any(name.startswith("slf4j-simple-") for name in names)


def test_jar_lock_has_unique_names_valid_digests_and_sizes() -> None:
    lock = read_jar_lock()
    assert len({jar.name for jar in lock.jars}) == len(lock.jars)
    assert all(re.fullmatch(r"[0-9a-f]{64}", jar.sha256) for jar in lock.jars)
    assert all(
        jar.size_bytes > 0 and jar.path.endswith(".jar") and not jar.path.startswith("/")
        for jar in lock.jars
    )
    assert 30_000_000 < lock.size_bytes < 50_000_000


def test_jar_lock_pins_a_single_kafka_version() -> None:
    lock = read_jar_lock()
    versions = {
        jar.path.split("/")[-2] for jar in lock.jars if jar.path.startswith("org/apache/kafka/")
    }
    assert versions == {lock.kafka_version}
