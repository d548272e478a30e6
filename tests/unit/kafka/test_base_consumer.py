"""Errors that a consumer's client returns instead of records: some are transient, the rest end the
worker.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError

from relax_events.errors import AccessDenied, BrokerError
from relax_events.kafka import consumer
from relax_events.kafka.base_consumer import BaseConsumer
from relax_events.kafka.connection import Connection


def fetched(error: KafkaError) -> list[object]:
    """Fetch where the client reports one error, of no partition."""
    report = SimpleNamespace(
        topic=lambda: None, partition=lambda: -1, offset=lambda: -1001, error=lambda: error
    )
    client = SimpleNamespace(poll=lambda seconds: report, consume=lambda count, seconds: [])
    return list(BaseConsumer(client, Connection("nowhere:1")).fetch(timeout_seconds=0.0))


@pytest.mark.parametrize(
    "code",
    [
        KafkaError._RESOLVE,
        KafkaError._TRANSPORT,
        KafkaError._ALL_BROKERS_DOWN,
        KafkaError._TIMED_OUT,
    ],
)
def test_consumer_waits_for_a_broker_that_is_down_or_unresolvable(code: int) -> None:
    assert (
        fetched(KafkaError(code, "FindCoordinator response error: Local: Host resolution failure"))
        == []
    )


@pytest.mark.parametrize(
    ("code", "expected"),
    [(KafkaError.GROUP_AUTHORIZATION_FAILED, AccessDenied), (KafkaError._INVALID_ARG, BrokerError)],
)
def test_permanent_broker_error_ends_the_worker(code: int, expected: type[BrokerError]) -> None:
    with pytest.raises(expected, match="reading the log"):
        fetched(KafkaError(code, "no"))


def test_max_poll_interval_is_one_day_whatever_the_run_file_sets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The run file can't change it: hung workers are detected by their heartbeats."""
    taken: list[dict[str, Any]] = []
    monkeypatch.setattr(
        consumer,
        "Consumer",
        lambda settings: taken.append(settings) or SimpleNamespace(subscribe=lambda *_, **__: None),
    )
    connection = Connection("nowhere:1", client={"max.poll.interval.ms": 46_000})
    consumer.SubscribedConsumer(connection, consumer_group="group", topics=["topic"])
    day = 24 * 60 * 60 * 1000
    assert [settings["max.poll.interval.ms"] for settings in taken] == [day]
