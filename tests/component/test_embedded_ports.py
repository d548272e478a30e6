"""Loopback ports: chosen free, checked before use."""

import socket
from collections.abc import Iterator

import pytest

from relax_events.errors import EnvironmentProblem
from relax_events.kafka.embedded import ports
from relax_events.kafka.embedded.ports import choose_port, is_free, require_free


@pytest.fixture
def listener() -> Iterator[int]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


def test_choose_port_gives_a_bindable_port_below_the_ephemeral_range() -> None:
    port = choose_port()
    assert 20_000 <= port < 32_000
    with socket.socket() as server:
        server.bind(("127.0.0.1", port))


def test_choose_port_avoids_taken_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "is_free", lambda port: True)
    monkeypatch.setattr(ports, "_FIRST_PORT", 20_000)
    monkeypatch.setattr(ports, "_LAST_PORT", 20_001)
    assert choose_port(taken=frozenset({20_000})) == 20_001


def test_choose_port_gives_up_when_nothing_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "is_free", lambda port: False)
    with pytest.raises(
        EnvironmentProblem,
        match=r"no free port on 127\.0\.0\.1 between 20000 and 31999 after 200 attempts",
    ):
        choose_port()


def test_is_free_reports_when_a_server_listens(listener: int) -> None:
    assert not is_free(listener)


def test_is_free_ignores_connections_that_linger() -> None:
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
            accepted, _ = server.accept()
            accepted.close()
            assert client.recv(1) == b""
    assert is_free(port)


def test_require_free_names_port_and_remedy_when_taken(listener: int) -> None:
    with pytest.raises(
        EnvironmentProblem,
        match=f"port {listener} on 127.0.0.1 is taken by another program; .*--port",
    ):
        require_free(listener)
