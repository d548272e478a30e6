"""Chooses and checks the loopback ports of a broker, which keeps them across restarts."""

import random
import socket

from relax_events.errors import EnvironmentProblem

HOST = "127.0.0.1"
# Below the range of ephemeral ports (from 32768 on Linux). So no outgoing connection occupies the
# port while the broker is down, and no client connects to itself, which loopback allows when source
# and destination port are equal.
_FIRST_PORT = 20_000
_LAST_PORT = 31_999
_NUM_ATTEMPTS = 200


def choose_port(*, taken: frozenset[int] = frozenset()) -> int:
    """Return a port that nothing listens on, outside the ephemeral range and outside `taken`.

    Raises:
        EnvironmentProblem: None of 200 tried ports was free.
    """
    for _ in range(_NUM_ATTEMPTS):
        port = random.randint(_FIRST_PORT, _LAST_PORT)  # noqa: S311 a port is no secret
        if port not in taken and is_free(port):
            return port
    raise EnvironmentProblem(
        f"no free port on {HOST} between {_FIRST_PORT} and {_LAST_PORT} after "
        f"{_NUM_ATTEMPTS} attempts; close some servers"
    )


def is_free(port: int) -> bool:
    """Return whether a server could listen on the port now, ignoring lingering connections of an
    earlier server.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def require_free(port: int) -> None:
    """Refuse a port that something else listens on.

    Raises:
        EnvironmentProblem: The port is taken.
    """
    if not is_free(port):
        raise build_port_error(port)


def build_port_error(port: int) -> EnvironmentProblem:
    """Return the error for a port that another program holds."""
    return EnvironmentProblem(
        f"port {port} on {HOST} is taken by another program; end that program, or choose another "
        "port: relax broker start --port"
    )
