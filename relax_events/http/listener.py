"""A socket to serve HTTP on, or a clear reason why there is none."""

from __future__ import annotations

import errno
import importlib.util
import socket

from relax_events.errors import EnvironmentProblem

PACKAGES = ("fastapi", "uvicorn")
"""What our APIs are made with; the extra `api` installs them."""


def find_missing_package() -> str:
    """Return a package of the extra `api` that is not installed; empty where all are."""
    return next((name for name in PACKAGES if importlib.util.find_spec(name) is None), "")


def open_listener(host: str, port: int, *, remedies: tuple[str, str], what: str) -> socket.socket:
    """Bind a TCP socket.

    Args:
        host: Address or name of this machine.
        port: 0 takes a free one.
        remedies: What to do where the port is taken, and where the address is not ours.
        what: Is to be served there, for the error.
    Raises:
        EnvironmentProblem: It can't be bound.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        remedy = remedies[0] if error.errno == errno.EADDRINUSE else remedies[1]
        raise EnvironmentProblem(
            f"can't serve {what} on {host}:{port}: {error.strerror}; {remedy}"
        ) from None
    return listener


def build_url(listener: socket.socket) -> str:
    """Give the address that a socket is bound to, as callers write it."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
