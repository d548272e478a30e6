"""Tells a broker that refuses us from one that is away: librdkafka says so in the background only,
and lets the call time out.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Mapping
from typing import Any

from confluent_kafka import KafkaError

from relax_events.errors import AccessDenied, BrokerError

PROBE_SECONDS = 3.0
USER_REMEDY = (
    "the broker does not know this user, or knows another password; see broker.username and "
    "broker.password_file, "
    "or bring the principals onto the broker: relax broker secure CONFIG --apply"
)
LOGIN_REMEDY = (
    "an embedded broker's password lies in its folder, name it in broker.embedded_password_file; "
    "for a cluster set broker.credentials, or broker.username with broker.password_file"
)
METADATA_REQUEST = bytes.fromhex("0000000e 0003 0001 00000001 ffff 00000000")
"""Of version 1, for no topic: size, request, version, correlation id, no client id, an empty
list."""
CERTIFICATE_REMEDY = (
    "set broker.ca_file to the authority that signed the brokers' certificates, use a host "
    "name that they hold, "
    "and renew what expired: relax broker secure CONFIG --renew-certificates"
)


class Refusals:
    """What the clients of one connection were refused for since they last got through. Safe to use
    from several threads.

    A thread that works in the background and can't go on leaves the error here, and `check` raises
    it where it is heard.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._latest: KafkaError | None = None
        self._since = 0.0
        self._denied: BrokerError | None = None

    def note(self, error: KafkaError) -> None:
        """Take in a background error of a client."""
        with self._lock:
            if error.code() in (KafkaError._AUTHENTICATION, KafkaError._SSL):
                self._since = self._since if self._latest else time.monotonic()
                self._latest = error
            elif "Connect to" in error.str():
                self._latest = None  # the broker is away now, whatever it said before

    def forget(self) -> None:
        """Note that a client got through."""
        with self._lock:
            self._latest = None

    def deny(self, error: BrokerError) -> None:
        """Leave the error that ended the work of a background thread."""
        self._denied = error

    def check(self) -> None:
        """Raise what ended the work of a background thread.

        Raises:
            AccessDenied: It was denied what it needs.
            BrokerRefused: The broker has no room for it.
            ClientFailed: Its client does nothing any more.
        """
        if self._denied is not None:
            raise self._denied

    @property
    def latest(self) -> KafkaError | None:
        """The newest refusal; None when there is none."""
        with self._lock:
            return self._latest

    @property
    def seconds(self) -> float:
        """For how long we have been refused without getting through."""
        with self._lock:
            return time.monotonic() - self._since if self._latest else 0.0


def refusal_error(
    what: str, error: KafkaError | None, settings: Mapping[str, Any]
) -> AccessDenied | None:
    """Return the error that says why a broker refuses us; None when it is away, as far as can be
    seen.

    Args:
        what: What was attempted.
        error: What a client heard, if anything.
        settings: Of the client.
    """
    if error is not None and error.code() == KafkaError._AUTHENTICATION:
        user = settings.get("sasl.username", "")
        return AccessDenied(f"{what}: {error.name()} user {user!r} was not let in; {USER_REMEDY}")
    protocol = str(settings.get("security.protocol", "PLAINTEXT")).upper()
    speaks_tls = "SSL" in protocol
    if speaks_tls and error is None:
        return None
    for address in map(str.strip, str(settings["bootstrap.servers"]).split(",")):
        reason = _handshake_problem(
            address, speaks_tls=speaks_tls, ca_file=settings.get("ssl.ca.location")
        )
        if (
            not reason and protocol == "PLAINTEXT" and _asks_for_login(address)
        ):  # a broker with TLS hangs up as well, and was found before
            reason = (
                f"the broker at {address} lets in only clients that log in, and this one does "
                f"not; {LOGIN_REMEDY}"
            )
        if reason:
            return AccessDenied(f"{what}: {reason}")
    if error is not None and "certificate" in error.str():
        return AccessDenied(f"{what}: {error.name()} {error.str()}; {CERTIFICATE_REMEDY}")
    return None  # a handshake that was cut off, as by a broker that restarts


def _asks_for_login(address: str) -> bool:
    """Tell whether a broker that speaks without TLS hangs up on whoever asks it something without
    logging in first.
    """
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=PROBE_SECONDS) as probe:
            probe.settimeout(PROBE_SECONDS)
            probe.sendall(METADATA_REQUEST)
            return probe.recv(1) == b""
    except (OSError, ValueError):
        return False


def _handshake_problem(address: str, *, speaks_tls: bool, ca_file: str | None) -> str:
    """Look at a broker's TLS as a client would, and say what is wrong with it; empty when nothing
    is, or nobody is there.
    """
    host, _, port = address.rpartition(":")
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
            socket.create_connection((host, int(port)), timeout=PROBE_SECONDS) as plain,
            context.wrap_socket(plain, server_hostname=host),
        ):
            remedy = (
                "set broker.credentials, or broker.username with broker.password_file and "
                "broker.ca_file"
            )
            return (
                ""
                if speaks_tls
                else f"the broker at {address} speaks TLS and this client does not; {remedy}"
            )
    except ssl.SSLCertVerificationError as error:
        return (
            f"the certificate of the broker at {address} can't be trusted: "
            f"{error.verify_message}; {CERTIFICATE_REMEDY}"
        )
    except ssl.SSLError as error:
        remedy = (
            "leave broker.credentials and broker.username out, or use the address of its secured "
            "listener"
        )
        return (
            (
                f"the broker at {address} does not speak TLS ({error.reason}) and this client "
                f"does; {remedy}"
            )
            if speaks_tls
            else ""
        )
    except (OSError, ValueError):
        return ""
