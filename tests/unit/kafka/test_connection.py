"""Settings of all clients, and translation of librdkafka's errors."""

from __future__ import annotations

import json
import time
from collections import Counter

import pytest
import structlog.testing
from confluent_kafka import KafkaError, KafkaException

from relax_events.errors import (
    AccessDenied,
    BrokerError,
    BrokerRefused,
    BrokerUnavailable,
    ClientFailed,
    Fenced,
)
from relax_events.kafka.auth_errors import AuthFailureTracker
from relax_events.kafka.connection import (
    BackgroundErrorLog,
    Connection,
    translate,
)
from relax_events.kafka.workarounds.lost_addresses import AddressMonitor
from relax_events.kafka.workarounds.lost_exceptions import translate_fatal_errors


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (KafkaError._FENCED, Fenced),
        (KafkaError.INVALID_PRODUCER_EPOCH, Fenced),
        (KafkaError._AUTHENTICATION, AccessDenied),
        (KafkaError.TOPIC_AUTHORIZATION_FAILED, AccessDenied),
        (KafkaError.MSG_SIZE_TOO_LARGE, BrokerRefused),
        (KafkaError._ALL_BROKERS_DOWN, BrokerUnavailable),
        (KafkaError._MSG_TIMED_OUT, BrokerUnavailable),
        (KafkaError._DESTROY_BROKER, BrokerUnavailable),
        (KafkaError.INVALID_TIMESTAMP, BrokerError),
    ],
)
def test_kafka_client_errors_are_translated_to_own_errors(
    code: int, kind: type[BrokerError]
) -> None:
    error = translate(KafkaError(code), "writing to t")
    assert type(error) is kind
    assert str(error).startswith(f"writing to t: {KafkaError(code).name()} ")


def test_fatal_error_behind_a_callback_failure_is_reported() -> None:
    with (
        pytest.raises(AccessDenied, match="delivering records: CLUSTER_AUTHORIZATION_FAILED"),
        translate_fatal_errors("delivering records"),
    ):
        raise SystemError("returned a result with an exception set") from KafkaException(
            KafkaError(KafkaError.CLUSTER_AUTHORIZATION_FAILED)
        )


def test_fatal_error_with_a_lost_exception_raises_client_failed() -> None:
    with (
        pytest.raises(
            ClientFailed, match="delivering records: the client met an unnamed fatal error"
        ),
        translate_fatal_errors("delivering records"),
    ):
        raise SystemError(
            "<method 'flush' of 'cimpl.Producer' objects> returned NULL without setting an "
            "exception"
        )


def test_other_system_errors_are_not_translated_to_client_errors() -> None:
    with (
        pytest.raises(SystemError, match="bad argument"),
        translate_fatal_errors("delivering records"),
    ):
        raise SystemError("bad argument to internal function")


def test_required_settings_override_user_settings_which_override_defaults() -> None:
    connection = Connection(
        "a:1", client={"socket.keepalive.enable": False, "sasl.username": "me"}, client_id="c"
    )
    settings = connection.settings(enable_idempotence=True, on_commit=print)
    assert settings["socket.keepalive.enable"] is False
    assert (settings["sasl.username"], settings["enable.idempotence"], settings["on_commit"]) == (
        "me",
        True,
        print,
    )
    assert (
        settings["bootstrap.servers"],
        settings["client.id"],
        settings["socket.timeout.ms"],
    ) == ("a:1", "c", 30_000)


def test_background_errors_are_logged_once_each() -> None:
    reported = BackgroundErrorLog("a:1", AuthFailureTracker(), Counter())
    with structlog.testing.capture_logs() as logs:
        for code in (
            KafkaError._TRANSPORT,
            KafkaError._TRANSPORT,
            KafkaError._ALL_BROKERS_DOWN,
            KafkaError._TRANSPORT,
        ):
            reported(KafkaError(code))
    assert [entry["error"] for entry in logs] == ["_TRANSPORT", "_ALL_BROKERS_DOWN"]


def reported(seconds: float, source: str, *, age: float = 0.0) -> str:
    brokers = {"GroupCoordinator": {"source": "logical"}, "a:1/1": {"source": source}}
    return json.dumps(
        {"name": "c", "ts": int(seconds * 1e6), "time": int(time.time() - age), "brokers": brokers}
    )


def lost_by(reports: list[str]) -> bool:
    auth_failures = AuthFailureTracker()
    watch = AddressMonitor("a:1", auth_failures, report_seconds=20.0)
    for report in reports:
        watch.update(report)
    try:
        auth_failures.raise_fatal()
    except ClientFailed:
        return True
    return False


def test_client_is_lost_after_a_minute_without_a_broker_address() -> None:
    assert lost_by([reported(at, "internal") for at in (0, 20, 40, 60)])
    assert not lost_by([reported(at, "internal") for at in (0, 20, 40)])


def test_client_is_not_lost_with_a_known_address_or_gaps_in_its_statistics() -> None:
    assert not lost_by([reported(at, "learned") for at in range(0, 200, 20)])
    assert not lost_by(
        [
            reported(at, source)
            for at, source in (
                (0, "internal"),
                (40, "configured"),
                (60, "internal"),
                (95, "internal"),
            )
        ]
    )
    assert not lost_by([reported(0, "internal"), reported(900, "internal")])
    assert not lost_by([reported(at, "internal", age=300) for at in range(0, 200, 20)])
