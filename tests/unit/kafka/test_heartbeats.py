"""When a client counts as silent, and the reduction of librdkafka's statistics to the values that
are used.
"""

from __future__ import annotations

import pytest
from confluent_kafka import KafkaError

from relax_events.errors import AccessDenied, BrokerError, BrokerUnavailable, ClientFailed, Fenced
from relax_events.kafka.connection import translate
from relax_events.kafka.workarounds.silent_members import (
    SILENT_SECONDS,
    STATISTICS_SECONDS,
    HeartbeatMonitor,
)


def statistics(
    seconds: float,
    *,
    sent: int,
    listed: int = 4,
    coordinator: str = "UP",
    broker: str = "UP",
    by_name: bool = False,
) -> str:
    """Return statistics with this number of requests to the coordinator; all but the heartbeats
    are listed by kind."""
    heartbeats = f', "ConsumerGroupHeartbeat": {sent - listed}' if by_name else ""
    requests = f'{{"Metadata": {listed - 1}, "ApiVersion": 1, "Fetch": 0{heartbeats}}}'
    return (
        f'{{"ts": {int(seconds * 1e6)}, "brokers": {{"127.0.0.1:1/1": {{"state": "{broker}", '
        f'"tx": 900, "req": {{"Fetch": 890}}}}, '
        f'"GroupCoordinator": {{"state": "{coordinator}", "tx": {sent}, "req": {requests}}}}}}}'
    )


def silent_after(
    watch: HeartbeatMonitor,
    count: int,
    *,
    start: float = 2.0,
    step: float = STATISTICS_SECONDS,
    **said: object,
) -> float | None:
    """Note the same again and again; return how many seconds after the first time the client counts
    as silent."""
    for number in range(count):
        watch.update(statistics(start + number * step, **said))  # type: ignore[arg-type]
        if watch.is_silent:
            return number * step
    return None


@pytest.mark.parametrize("by_name", [False, True])
def test_client_sending_only_other_requests_is_reported_silent(by_name: bool) -> None:
    watch = HeartbeatMonitor()
    watch.update(statistics(0.0, sent=5, by_name=by_name))
    for number in range(1, 7):  # twelve seconds of metadata requests, exactly what is allowed
        watch.update(statistics(number * 2.0, sent=5 + number, listed=4 + number, by_name=by_name))
        assert not watch.is_silent
    watch.update(statistics(14.0, sent=12, listed=11, by_name=by_name))
    assert watch.is_silent
    watch.update(statistics(16.0, sent=13, listed=11, by_name=by_name))
    assert not watch.is_silent


def test_client_without_a_coordinator_is_reported_silent() -> None:
    watch = HeartbeatMonitor()
    watch.update(statistics(0.0, sent=9))
    assert silent_after(watch, 20, sent=9, coordinator="DOWN") == SILENT_SECONDS


def test_client_is_not_silent_before_joining_or_while_the_broker_is_down() -> None:
    watch = HeartbeatMonitor()
    assert silent_after(watch, 50, sent=4) is None
    watch.update(statistics(200.0, sent=9))
    assert silent_after(watch, 50, start=202.0, sent=9, coordinator="DOWN", broker="DOWN") is None
    assert (
        silent_after(watch, 5, start=302.0, sent=9) is None
    )  # the broker is back for eight seconds


def test_time_while_the_process_was_suspended_is_not_counted_as_silence() -> None:
    watch = HeartbeatMonitor()
    watch.update(statistics(0.0, sent=9))
    watch.update(statistics(300.0, sent=9))
    assert not watch.is_silent


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (KafkaError(KafkaError._FATAL, "the group id does not exist"), ClientFailed),
        (KafkaError(KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER, "a gap", fatal=True), ClientFailed),
        (KafkaError(KafkaError.PRODUCER_FENCED, "another one", fatal=True), Fenced),
        (
            KafkaError(KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, "not yours", fatal=True),
            AccessDenied,
        ),
        (KafkaError(KafkaError._TRANSPORT, "gone"), BrokerUnavailable),
        (KafkaError(KafkaError.UNKNOWN, "what"), BrokerError),
    ],
)
def test_kafka_error_is_translated_to_the_matching_broker_error(
    error: KafkaError, expected: type[BrokerError]
) -> None:
    assert type(translate(error, "reading")) is expected
