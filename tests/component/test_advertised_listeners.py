"""A broker that answers, and names itself as this machine can't use it: the error has the name."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from relax_events.errors import BrokerUnavailable
from relax_events.kafka.admin import Admin
from relax_events.kafka.connection import Connection
from relax_events.kafka.protocol.advertised_listeners import (
    explain_unresolved_names,
    explain_unusable_names,
    find_unresolved,
)

METADATA = 3
UNKNOWN = "kafka-0.kafka.internal.invalid"
"""No resolver knows names below `invalid` (RFC 2606)."""
FakeBroker = Callable[..., str]


def encode(text: str) -> bytes:
    """Encode a string as the protocol does."""
    return struct.pack(">h", len(text)) + text.encode()


def encode_metadata(names: list[tuple[str, int]]) -> bytes:
    """Encode a response of Metadata v7 with brokers and no topic."""
    brokers = b"".join(
        struct.pack(">i", node) + encode(host) + struct.pack(">i", port) + struct.pack(">h", -1)
        for node, (host, port) in enumerate(names)
    )
    return (
        struct.pack(">ii", 0, len(names)) + brokers + encode("cluster") + struct.pack(">ii", 0, 0)
    )


def serve(server: socket.socket, names: list[tuple[str, int]]) -> None:
    """Answer requests for metadata, and close the connection at every other request."""
    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            return
        with connection:
            connection.settimeout(5)
            try:
                head = connection.recv(4096)
                _, key, _, correlation = struct.unpack(">ihhi", head[:12])
                if key == METADATA:
                    body = struct.pack(">i", correlation) + encode_metadata(names)
                    connection.sendall(struct.pack(">i", len(body)) + body)
            except (OSError, struct.error):
                continue


@pytest.fixture
def open_broker() -> Iterator[FakeBroker]:
    """Return a maker of brokers that name these brokers, and return their own address."""
    with ExitStack() as stack:

        def make(*names: tuple[str, int]) -> str:
            server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            stack.callback(server.shutdown, socket.SHUT_RDWR)
            host, port = server.getsockname()
            whole = list(names) or [(host, port)]
            threading.Thread(target=serve, args=(server, whole), daemon=True).start()
            return f"{host}:{port}"

        yield make


@pytest.fixture(autouse=True)
def quick_resolver() -> Iterator[None]:
    """Fail at once for names that no resolver knows; a machine without one waits for seconds."""
    resolve = socket.getaddrinfo

    def fail(host: str, *others: object, **options: object) -> object:
        if str(host).endswith(".invalid"):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return resolve(host, *others, **options)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", fail)
        yield


def closed_port() -> int:
    """Return a port that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


@pytest.mark.parametrize(
    "names",
    [
        [(UNKNOWN, 9092)],
        [(UNKNOWN, 9092), ("kafka-1.invalid", 9092)],
        [("127.0.0.1", 0), (UNKNOWN, 9092)],
        [("a" * 64 + ".invalid", 9092)],
        [("under_score.invalid", 29092)],
        [("", 9092)],
    ],
)
def test_a_name_that_can_not_be_resolved_is_named(
    names: list[tuple[str, int]], open_broker: FakeBroker
) -> None:
    working = open_broker()
    port = int(working.rpartition(":")[2])
    names = [(host, number or port) for host, number in names]
    address = open_broker(*names)
    host, number = next(name for name in names if name[0] != "127.0.0.1")
    assert explain_unusable_names(Connection(address)) == (
        f"the broker at {address} answered and names itself {host}:{number}, which this machine "
        "can't resolve; see advertised.listeners in the broker's settings, or give this machine "
        "the name"
    )


def test_a_name_that_accepts_no_connection_is_named(open_broker: FakeBroker) -> None:
    """As a container that advertises its own port on localhost."""
    port = closed_port()
    problem = explain_unusable_names(Connection(open_broker(("localhost", port))))
    assert f"names itself localhost:{port}, which accepts no connection from this" in problem


def test_a_broker_whose_names_work_has_no_problem(open_broker: FakeBroker) -> None:
    assert explain_unusable_names(Connection(open_broker())) == ""
    assert explain_unusable_names(Connection(f"127.0.0.1:{closed_port()}")) == "", "it is down"


def test_a_configured_name_that_can_not_be_resolved_is_another_error() -> None:
    problem = explain_unusable_names(Connection(f"{UNKNOWN}:9092"))
    assert problem.startswith(f"broker.bootstrap_servers names {UNKNOWN}:9092, which this machine")


def test_a_command_ends_with_the_name(open_broker: FakeBroker) -> None:
    admin = Admin(Connection(open_broker((UNKNOWN, 9092))))
    with pytest.raises(BrokerUnavailable, match=rf"answered and names itself {UNKNOWN}:9092, "):
        admin.ping(timeout_seconds=0.5)
    admin.close()
    admin = Admin(Connection(f"127.0.0.1:{closed_port()}"))
    with pytest.raises(BrokerUnavailable, match="no broker answered at"):
        admin.ping(timeout_seconds=0.5)
    admin.close()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(["127.0.0.1:1", "[::1]:2", f"{UNKNOWN}:3", "b.invalid:4"])))
def test_brokers_are_unusable_when_no_name_is_known(names: list[str]) -> None:
    unknown = [name for name in names if "invalid" in name]
    assert find_unresolved(names) == unknown
    problem = explain_unresolved_names(Connection("127.0.0.1:5"), names)
    assert bool(problem) == (bool(names) and unknown == names)
    assert not problem or names[0] in problem
