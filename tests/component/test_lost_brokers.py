"""A client that has lost all brokers permanently ends its worker; brokers that are down do not."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from relax_events.errors import ClientFailed
from relax_events.kafka import consumer as consumers
from relax_events.kafka import log_reader as log_readers
from relax_events.kafka import producer as producers
from relax_events.kafka import share_leases
from relax_events.kafka.connection import Connection
from relax_events.kafka.consumer import SubscribedConsumer
from relax_events.kafka.embedded.ports import choose_port
from relax_events.kafka.log_reader import LogReader
from relax_events.kafka.producer import RecordProducer
from relax_events.kafka.records import ProducerRecord
from relax_events.kafka.share_leases import ShareGroupLeases
from relax_events.kafka.workarounds.lost_addresses import LOST_SECONDS


@pytest.fixture
def connection() -> Connection:
    return Connection(f"127.0.0.1:{choose_port()}", request_timeout_seconds=1.0)


class Made(Exception):
    """Carries the settings that a client was to be made with."""


def refuse(settings: dict[str, Any]) -> None:
    raise Made(settings)


def lost(seconds: float) -> str:
    """Return the statistics of a librdkafka 2.16 group consumer that has dropped all brokers."""
    brokers = {"GroupCoordinator": {"source": "logical", "state": "INIT", "tx": 0}}
    return json.dumps(
        {"name": "c", "ts": int(seconds * 1e6), "time": int(time.time()), "brokers": brokers}
    )


MAKERS: list[Callable[[Connection], object]] = [
    lambda connection: SubscribedConsumer(connection, consumer_group="g", topics=["t"]),
    LogReader,
    RecordProducer,
    lambda connection: ShareGroupLeases(
        connection, group="g", topic="t", max_leases=1, on_lease=print
    ),
]


@pytest.mark.parametrize(
    "make", MAKERS, ids=["group_consumer", "log_reader", "producer", "share_lane"]
)
def test_client_that_lost_all_brokers_for_good_ends_its_worker(
    make: Callable[[Connection], object], connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name in (
        (consumers, "Consumer"),
        (log_readers, "Consumer"),
        (producers, "Producer"),
        (share_leases, "ShareConsumer"),
    ):
        monkeypatch.setattr(module, name, refuse)
    with pytest.raises(Made) as made:
        make(connection)
    settings = made.value.args[0]
    seconds = settings["statistics.interval.ms"] / 1000
    for number in range(int(LOST_SECONDS / seconds) + 2):
        settings["stats_cb"](lost(number * seconds))
    with pytest.raises(
        ClientFailed,
        match=rf"a client of {connection.bootstrap_servers} has known no broker for \d+ s .* restart the worker",
    ):
        connection.auth_failures.raise_fatal()


def test_client_waits_for_temporarily_unreachable_brokers(
    connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relax_events.kafka.workarounds.lost_addresses.LOST_SECONDS", 1.0)
    monkeypatch.setattr(consumers, "STATISTICS_SECONDS", 0.2)
    client = SubscribedConsumer(connection, consumer_group="g", topics=["t"])
    until = time.monotonic() + 3.0
    while time.monotonic() < until:
        client.fetch(1, timeout_seconds=0.1)
    client.close()
    connection.auth_failures.raise_fatal()


def test_flush_raises_when_a_client_of_the_worker_is_lost(connection: Connection) -> None:
    producer = RecordProducer(connection)
    producer.send(ProducerRecord("t", b"x"))
    connection.auth_failures.report_fatal(ClientFailed("lost"))
    with pytest.raises(ClientFailed, match="lost"):
        producer.flush()
    producer._producer.purge()
    producer._producer.flush(1)
