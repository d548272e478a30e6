"""Tells whether this machine can use the names under which brokers want to be reached.

A client asks a configured address for the brokers of the cluster, and connects to the names in the
answer (`advertised.listeners`): those of a container network mean nothing on another machine.
librdkafka reports no more than a time-out then.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable

from relax_events.config.addresses import split_address
from relax_events.errors import ConfigError
from relax_events.kafka.connection import Connection
from relax_events.kafka.protocol.partition_leaders import read_metadata_from

CONNECT_SECONDS = 1.0
REMEDY = "see advertised.listeners in the broker's settings, or give this machine the name"


def explain_unusable_names(connection: Connection) -> str:
    """Return why no broker can be used although its address is right, in one sentence; empty if
    that is not the cause.
    """
    if unresolved := find_unresolved(connection.addresses):
        return (
            f"broker.bootstrap_servers names {unresolved[0]}, which this machine can't resolve; "
            "set it to a name that it can"
        )
    brokers = read_metadata_from(connection, connection.addresses, ())
    for address, metadata in brokers.items():
        for name in metadata.addresses:
            if problem := _find_problem(name):
                return f"the broker at {address} answered and names itself {name}, which {problem}"
    return ""


def explain_unresolved_names(connection: Connection, names: Iterable[str]) -> str:
    """Return a sentence about brokers none of whose names this machine can resolve; empty if it can
    resolve one.

    Args:
        connection: That they were asked through.
        names: Of all brokers of the cluster, each `host:port`.
    """
    names = list(names)
    unresolved = find_unresolved(names)
    if not names or len(unresolved) < len(names):
        return ""
    return (
        f"the broker at {connection.bootstrap_servers} answered and names itself {unresolved[0]}, "
        f"which this machine can't resolve; {REMEDY}"
    )


def find_unresolved(addresses: Iterable[str]) -> list[str]:
    """Return the addresses whose hosts this machine can't resolve."""
    return [address for address in addresses if not _resolves(address)]


def _resolves(address: str) -> bool:
    try:
        socket.getaddrinfo(*split_address(address), type=socket.SOCK_STREAM)
    except (ConfigError, OSError, UnicodeError):
        return False
    return True


def _find_problem(address: str) -> str:
    """Return why an address can't be used from here; empty if it accepts a connection."""
    if not _resolves(address):
        return f"this machine can't resolve; {REMEDY}"
    try:
        socket.create_connection(split_address(address), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        return f"accepts no connection from this machine ({error}); {REMEDY}"
    return ""
