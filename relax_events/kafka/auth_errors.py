"""Distinguishes a broker that denies access from a broker that is down.

librdkafka reports authentication and TLS errors only in the background and lets the call time out.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Mapping
from typing import Any

from confluent_kafka import KafkaError

from relax_events.config.addresses import list_addresses, split_address
from relax_events.errors import AccessDenied, RelaxError

PROBE_SECONDS = 3.0
USER_REMEDY = (
    "the broker does not know this user, or has another password for it; see broker.username and "
    "broker.password_file, "
    "or create the principals on the broker: relax broker secure CONFIG --apply"
)
LOGIN_REMEDY = (
    "for an embedded broker name the password file of its folder in broker.embedded_password_file; "
    "for a cluster set broker.credentials, or broker.username with broker.password_file"
)
METADATA_REQUEST = bytes.fromhex("0000000e 0003 0001 00000001 ffff 00000000")
"""Metadata request version 1 for no topic: size, API key, version, correlation id, no client id, an
empty list."""
UNANSWERED = "Local: Timed out"
"""In the text of a login that the broker did not answer: it is slow or stopped, and refused
nothing."""
CERTIFICATE_REMEDY = (
    "set broker.ca_file to the authority that signed the brokers' certificates, use a host "
    "name that they contain, and renew expired ones: relax broker secure CONFIG "
    "--renew-certificates"
)


class AuthFailureTracker:
    """The authentication failures of one connection's clients since their last success.
    Thread-safe.

    A background thread stores its fatal error here, and `raise_fatal` raises it in the worker's
    main thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._latest: KafkaError | None = None
        self._since = 0.0
        self._fatal: RelaxError | None = None

    def record(self, error: KafkaError) -> None:
        """Record a background error of a client."""
        with self._lock:
            is_about_access = error.code() in (KafkaError._AUTHENTICATION, KafkaError._SSL)
            if is_about_access and UNANSWERED not in error.str():
                self._since = self._since if self._latest else time.monotonic()
                self._latest = error
            elif "Connect to" in error.str():
                self._latest = None  # the broker is down now, so earlier failures are outdated

    def clear(self) -> None:
        """Clear the failures after a client has succeeded."""
        with self._lock:
            self._latest = None

    def report_fatal(self, error: RelaxError) -> None:
        """Store the error that ended a background thread."""
        self._fatal = error

    def raise_fatal(self) -> None:
        """Raise the error that ended a background thread, if there is one.

        Raises:
            AccessDenied: The thread lacks a permission.
            BrokerRefused: The share group is full.
            ClientFailed: The thread's client stopped working.
            SchemaError: Processes of two schema registries write on one log.
        """
        if self._fatal is not None:
            raise self._fatal

    @property
    def latest(self) -> KafkaError | None:
        """The newest authentication failure, or None."""
        with self._lock:
            return self._latest

    @property
    def seconds(self) -> float:
        """Seconds since the first failure without a success; 0 when there is none."""
        with self._lock:
            return time.monotonic() - self._since if self._latest else 0.0


def explain_refusal(
    what: str, error: KafkaError | None, settings: Mapping[str, Any]
) -> AccessDenied | None:
    """Return the error that explains why a broker denies access, or None when the broker seems to
    be down.

    Args:
        what: The attempted operation, for the error text.
        error: The client's background error, if there is one.
        settings: The client's settings.
    Raises:
        ConfigError: An address can't be read.
    """
    if error is not None and error.code() == KafkaError._AUTHENTICATION:
        user = settings.get("sasl.username", "")
        return AccessDenied(
            f"{what}: {error.name()} authentication of user {user!r} failed; {USER_REMEDY}"
        )
    protocol = str(settings.get("security.protocol", "PLAINTEXT")).upper()
    speaks_tls = "SSL" in protocol
    if speaks_tls and error is None:
        return None
    for address in list_addresses(str(settings["bootstrap.servers"])):
        reason = _find_tls_problem(
            address, speaks_tls=speaks_tls, ca_file=settings.get("ssl.ca.location")
        )
        if (
            not reason and protocol == "PLAINTEXT" and _requires_login(address)
        ):  # a broker with TLS closes the connection as well, and was detected before
            reason = (
                f"the broker at {address} requires authentication, and this client has no "
                f"credentials; {LOGIN_REMEDY}"
            )
        if reason:
            return AccessDenied(f"{what}: {reason}")
    if error is not None and "certificate" in error.str():
        return AccessDenied(f"{what}: {error.name()} {error.str()}; {CERTIFICATE_REMEDY}")
    return None  # an interrupted handshake, for example with a broker that restarts


def _requires_login(address: str) -> bool:
    """Return whether a plaintext broker closes connections that send a request before
    authenticating.
    """
    host, port = split_address(address)
    try:
        with socket.create_connection((host, port), timeout=PROBE_SECONDS) as probe:
            probe.settimeout(PROBE_SECONDS)
            probe.sendall(METADATA_REQUEST)
            return probe.recv(1) == b""
    except OSError:
        return False


def _find_tls_problem(address: str, *, speaks_tls: bool, ca_file: str | None) -> str:
    """Try a TLS handshake and describe what is wrong; empty when nothing is, or the broker is
    down.
    """
    host, port = split_address(address)
    try:
        context = ssl.create_default_context(cafile=ca_file)
    except OSError as error:
        return (
            f"broker.ca_file {ca_file} can't be used: {error.strerror or error}; give a PEM file "
            "of certificates"
        )
    if not speaks_tls:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with (
            socket.create_connection((host, port), timeout=PROBE_SECONDS) as plain,
            context.wrap_socket(plain, server_hostname=host),
        ):
            return (
                ""
                if speaks_tls
                else f"the broker at {address} uses TLS and this client does not; set "
                "broker.credentials, or broker.username with broker.password_file and "
                "broker.ca_file"
            )
    except ssl.SSLCertVerificationError as error:
        return (
            f"the certificate of the broker at {address} can't be trusted: "
            f"{error.verify_message}; {CERTIFICATE_REMEDY}"
        )
    except ssl.SSLError as error:
        return (
            f"the broker at {address} does not use TLS ({error.reason}) and this client does; "
            "remove broker.credentials and broker.username, or use the address of its secured "
            "listener"
            if speaks_tls
            else ""
        )
    except OSError:
        return ""
