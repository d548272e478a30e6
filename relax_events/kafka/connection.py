"""Connection settings of all Kafka clients, the translation of librdkafka's errors into ours, and
retries while the broker is unavailable.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeVar

import structlog
from confluent_kafka import KafkaError, KafkaException

from relax_events.config.addresses import list_addresses
from relax_events.config.broker import BrokerConfig
from relax_events.deadline import Deadline
from relax_events.errors import (
    AccessDenied,
    BrokerError,
    BrokerRefused,
    BrokerUnavailable,
    ClientFailed,
    Fenced,
)
from relax_events.kafka.auth_errors import USER_REMEDY, AuthFailureTracker, explain_refusal
from relax_events.kafka.security.settings import read_client_settings
from relax_events.kafka.workarounds.lost_addresses import REPORT_SECONDS, AddressMonitor

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
    # the client dropped a broker address that the cluster no longer lists, and has others
    KafkaError._DESTROY_BROKER,
    KafkaError.REQUEST_TIMED_OUT,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.NOT_COORDINATOR,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.BROKER_NOT_AVAILABLE,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.NETWORK_EXCEPTION,
    KafkaError._NOENT,  # no leader is known, for example right after a broker's restart
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
            "this principal lacks the permission; ACLs are defined in kafka/security/acls.py "
            "and applied by: relax broker secure CONFIG --apply"
        ),
    ),
}
QUIET_SECONDS = 10.0  # attempts come about every second
CALLBACKS = {"error_cb", "on_commit", "stats_cb"}


def extract_error(exception: KafkaException) -> KafkaError:
    """Return the KafkaError of an exception."""
    error: KafkaError = exception.args[0]
    return error


def translate(error: KafkaError, what: str) -> BrokerError:
    """Translate an error of librdkafka into ours; the text names the attempted operation."""
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


@dataclass(frozen=True)
class Connection:
    """Addresses, credentials and settings that all clients of a process share."""

    bootstrap_servers: str
    request_timeout_seconds: float = 30.0
    client: Mapping[str, Any] = field(default_factory=dict)
    client_id: str = "relax"
    credentials: Mapping[str, str] = field(default_factory=dict, repr=False)
    auth_failures: AuthFailureTracker = field(
        default_factory=AuthFailureTracker, repr=False, compare=False
    )
    errors: Counter[str] = field(default_factory=Counter, repr=False, compare=False)
    """Background errors of the clients, counted by librdkafka's error name."""
    shared: dict[type[Any], Any] = field(default_factory=dict, repr=False, compare=False)
    """What the clients of this connection share, by its type."""

    @classmethod
    def from_config(cls, config: BrokerConfig, *, client_id: str) -> Connection:
        """Create a connection from a run's configuration.

        Raises:
            ConfigError: A secret can't be read from its file.
        """
        return cls(
            config.bootstrap_servers,
            config.request_timeout_seconds,
            config.client,
            client_id,
            read_client_settings(config),
        )

    @property
    def addresses(self) -> list[str]:
        """The configured addresses, each `host:port`."""
        return list_addresses(self.bootstrap_servers)

    def with_timeout_of_at_most(self, seconds: float) -> Self:
        """Return the connection with a request timeout of at most so many seconds."""
        return replace(self, request_timeout_seconds=min(self.request_timeout_seconds, seconds))

    def settings(self, **more: Any) -> dict[str, Any]:
        """Return librdkafka settings: our defaults, the user's settings, then those in `more`,
        which take precedence. They contain secrets; never log them.
        """
        base: dict[str, Any] = {
            "bootstrap.servers": self.bootstrap_servers,
            "client.id": self.client_id,
            "socket.timeout.ms": int(self.request_timeout_seconds * 1000),
            "socket.keepalive.enable": True,
            "reconnect.backoff.ms": 50,
            "reconnect.backoff.max.ms": 1000,
            # an isolated broker still claims to be leader; metadata of others corrects that
            "topic.metadata.refresh.interval.ms": 10_000,
            "log_level": 2,
            "error_cb": BackgroundErrorLog(self.bootstrap_servers, self.auth_failures, self.errors),
        }
        dotted = {
            key if key in CALLBACKS else key.replace("_", "."): value for key, value in more.items()
        }
        return base | dict(self.credentials) | dict(self.client) | dotted

    def lasting_settings(
        self,
        *,
        report_seconds: float = REPORT_SECONDS,
        stats_cb: Callable[[str], None] = lambda _: None,
        **more: Any,
    ) -> dict[str, Any]:
        """Return the settings of a client that lives as long as its worker: it ends the worker if
        it permanently loses all brokers.

        Args:
            report_seconds: The interval of the client's statistics.
            stats_cb: Also receives each report.
            more: Further settings, as for `settings`.
        """
        watch = AddressMonitor(
            self.bootstrap_servers, self.auth_failures, report_seconds=report_seconds
        )

        def report(statistics: str) -> None:
            watch.update(statistics)
            stats_cb(statistics)

        return self.settings(
            statistics_interval_ms=int(report_seconds * 1000), stats_cb=report, **more
        )

    def translate(self, error: KafkaError, what: str) -> BrokerError:
        """Translate an error of librdkafka; for a time-out, first check whether the broker denies
        access.
        """
        translated = translate(error, what)
        return (
            self.find_refusal(what) or translated
            if isinstance(translated, BrokerUnavailable)
            else translated
        )

    def find_refusal(self, what: str) -> AccessDenied | None:
        """Return an error if a broker responds and denies access, None if it is down. Call it after
        a time-out: it probes the broker.
        """
        return explain_refusal(what, self.auth_failures.latest, self.settings())


class BackgroundErrorLog:
    """Logs librdkafka's background errors: each kind once per outage, not at every attempt."""

    def __init__(
        self, bootstrap_servers: str, auth_failures: AuthFailureTracker, errors: Counter[str]
    ) -> None:
        self._bootstrap_servers, self._auth_failures, self._errors = (
            bootstrap_servers,
            auth_failures,
            errors,
        )
        self._logged_at: dict[int, float] = {}
        self._lock = threading.Lock()

    def __call__(self, error: KafkaError) -> None:
        """Log an error unless the same kind was logged within `QUIET_SECONDS`."""
        self._auth_failures.record(error)
        now = time.monotonic()
        with self._lock:
            self._errors[error.name()] += 1
            is_news = now - self._logged_at.get(error.code(), -QUIET_SECONDS) >= QUIET_SECONDS
            self._logged_at[error.code()] = now
        if is_news:
            log.warning(
                "broker.client_failed",
                bootstrap_servers=self._bootstrap_servers,
                error=error.name(),
                text=error.str(),
            )


ResultT = TypeVar("ResultT")


def is_unavailable(error: BrokerError) -> bool:
    """Return whether an error is BrokerUnavailable, which a retry may cure."""
    return isinstance(error, BrokerUnavailable)


def retry_while_unavailable(
    request: Callable[[], ResultT],
    deadline: Deadline,
    *,
    pause_seconds: float,
    should_retry: Callable[[BrokerError], bool] = is_unavailable,
) -> ResultT:
    """Send a request until it succeeds or the deadline has passed.

    Args:
        request: Sends the request once.
        deadline: The time after which an error is raised instead of retried.
        pause_seconds: The pause between two attempts.
        should_retry: Whether an error is transient; all others are raised at once.
    Raises:
        BrokerError: The error of the last attempt.
    """
    while True:
        try:
            return request()
        except BrokerError as error:
            if not should_retry(error) or deadline.passed:
                raise
        time.sleep(pause_seconds)
