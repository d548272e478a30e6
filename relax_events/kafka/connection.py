"""How every client reaches the broker: addresses, deadlines, and the translation of librdkafka's
errors, done once.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import structlog
from confluent_kafka import KafkaError, KafkaException

from relax_events.config import BrokerConfig
from relax_events.errors import (
    AccessDenied,
    BrokerError,
    BrokerRefused,
    BrokerUnavailable,
    ClientFailed,
    Fenced,
)
from relax_events.kafka.auth_errors import USER_REMEDY, Refusals, refusal_error
from relax_events.kafka.credentials import client_settings

log = structlog.get_logger()

FENCED = {
    KafkaError._FENCED,
    KafkaError.INVALID_PRODUCER_EPOCH,
    KafkaError.PRODUCER_FENCED,
    KafkaError.TRANSACTION_COORDINATOR_FENCED,
}
UNAVAILABLE = {
    KafkaError._ALL_BROKERS_DOWN,
    KafkaError._TRANSPORT,
    KafkaError._TIMED_OUT,
    KafkaError._MSG_TIMED_OUT,
    KafkaError._RESOLVE,
    # the client gave up its handle of an address that the brokers no longer name, and has another
    KafkaError._DESTROY_BROKER,
    KafkaError.REQUEST_TIMED_OUT,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.NOT_COORDINATOR,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.BROKER_NOT_AVAILABLE,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.NETWORK_EXCEPTION,
    KafkaError._NOENT,  # no leader is known, as when the broker has just come back
    KafkaError.FENCED_LEADER_EPOCH,
    KafkaError.UNKNOWN_LEADER_EPOCH,
}
REFUSED = {
    KafkaError._AUTHENTICATION,
    KafkaError._SSL,
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    KafkaError.SASL_AUTHENTICATION_FAILED,
    KafkaError.MSG_SIZE_TOO_LARGE,
    KafkaError.POLICY_VIOLATION,
    KafkaError.INVALID_CONFIG,
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError._UNKNOWN_TOPIC,
}

REMEDIES = {
    KafkaError._AUTHENTICATION: USER_REMEDY,
    KafkaError.SASL_AUTHENTICATION_FAILED: USER_REMEDY,
    **dict.fromkeys(
        (
            KafkaError.TOPIC_AUTHORIZATION_FAILED,
            KafkaError.GROUP_AUTHORIZATION_FAILED,
            KafkaError.CLUSTER_AUTHORIZATION_FAILED,
            KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
        ),
        (
            "this principal has no right to it; rights are those of topics/rights.py, brought "
            "onto the broker by: relax broker secure CONFIG --apply"
        ),
    ),
}
QUIET_SECONDS = 10.0  # attempts come about every second
EXCEPTION_LOST = "without setting an exception"
CALLBACKS = {"error_cb", "on_commit", "stats_cb"}


def error_of(exception: KafkaException) -> KafkaError:
    """Return the KafkaError inside an exception."""
    error: KafkaError = exception.args[0]
    return error


def translate(error: KafkaError, what: str) -> BrokerError:
    """Return our error for librdkafka's, naming what was attempted."""
    text = f"{what}: {error.name()} {error.str()}"
    if error.code() in FENCED:
        return Fenced(f"{text}; another instance of this role took over")
    if error.code() in REFUSED:
        return (
            AccessDenied(f"{text}; {REMEDIES[error.code()]}")
            if error.code() in REMEDIES
            else BrokerRefused(text)
        )
    if error.fatal() or error.code() == KafkaError._FATAL:
        return ClientFailed(text)
    if error.code() in UNAVAILABLE or error.retriable():
        return BrokerUnavailable(text)
    return BrokerError(text)


@contextmanager
def fatal_errors(what: str) -> Iterator[None]:
    """Translate an error after which a client does nothing any more.

    The client sets its exception and goes on with our callbacks, where the first call into it trips
    over that, or the exception gets lost (seen once with confluent-kafka 2.16.1).

    Raises:
        BrokerError: The block met one.
    """
    try:
        yield
    except SystemError as broken:
        if isinstance(broken.__cause__, KafkaException):
            raise translate(error_of(broken.__cause__), what) from broken
        if EXCEPTION_LOST in str(broken):
            raise ClientFailed(
                f"{what}: the client met a fatal error that it does not name; the worker "
                "must start again to go on"
            ) from broken
        raise


@dataclass(frozen=True)
class Connection:
    """Addresses and settings that all clients of a process share."""

    bootstrap_servers: str
    request_timeout_seconds: float = 30.0
    client: Mapping[str, Any] = field(default_factory=dict)
    client_id: str = "relax"
    credentials: Mapping[str, str] = field(default_factory=dict, repr=False)
    refusals: Refusals = field(default_factory=Refusals, repr=False, compare=False)
    errors: Counter[str] = field(default_factory=Counter, repr=False, compare=False)
    """What clients met in the background, by librdkafka's name for it."""

    @classmethod
    def of(cls, config: BrokerConfig, *, client_id: str) -> Connection:
        """Read a connection off a run's configuration.

        Raises:
            ConfigError: A secret can't be read from its file.
        """
        return cls(
            config.bootstrap_servers,
            config.request_timeout_seconds,
            config.client,
            client_id,
            client_settings(config),
        )

    def settings(self, **more: Any) -> dict[str, Any]:
        """Return librdkafka settings: ours, then the user's, then those that carry a promise. They
        hold secrets: never show them.
        """
        base: dict[str, Any] = {
            "bootstrap.servers": self.bootstrap_servers,
            "client.id": self.client_id,
            "socket.timeout.ms": int(self.request_timeout_seconds * 1000),
            "socket.keepalive.enable": True,
            "reconnect.backoff.ms": 50,
            "reconnect.backoff.max.ms": 1000,
            # a broker that was cut off still says that it leads; others know better
            "topic.metadata.refresh.interval.ms": 10_000,
            "log_level": 2,
            "error_cb": ConnectionLog(self.bootstrap_servers, self.refusals, self.errors),
        }
        dotted = {
            key if key in CALLBACKS else key.replace("_", "."): value for key, value in more.items()
        }
        return base | dict(self.credentials) | dict(self.client) | dotted

    def translate(self, error: KafkaError, what: str) -> BrokerError:
        """Return our error for librdkafka's; where it only says that nobody answered, say whether
        we were refused.
        """
        translated = translate(error, what)
        return (
            self.refused(what) or translated
            if isinstance(translated, BrokerUnavailable)
            else translated
        )

    def refused(self, what: str) -> AccessDenied | None:
        """Return the error when the broker is there and does not let us in; None when it is away.
        Call it after a time-out: it looks.
        """
        return refusal_error(what, self.refusals.latest, self.settings())


class ConnectionLog:
    """Turns librdkafka's background errors into log events: each kind once when the broker goes,
    not on every attempt.
    """

    def __init__(self, bootstrap_servers: str, refusals: Refusals, errors: Counter[str]) -> None:
        self._bootstrap_servers, self._refusals, self._errors = bootstrap_servers, refusals, errors
        self._logged_at: dict[int, float] = {}
        self._lock = threading.Lock()

    def __call__(self, error: KafkaError) -> None:
        """Log an error unless it is the one before again."""
        self._refusals.note(error)
        now = time.monotonic()
        with self._lock:
            self._errors[error.name()] += 1
            is_news = now - self._logged_at.get(error.code(), -QUIET_SECONDS) >= QUIET_SECONDS
            self._logged_at[error.code()] = now
        if is_news:
            log.warning(
                "broker.disturbed",
                bootstrap_servers=self._bootstrap_servers,
                error=error.name(),
                text=error.str(),
            )
