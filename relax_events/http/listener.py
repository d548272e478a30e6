"""Opens the listening socket of an HTTP server, or explains why that fails."""

from __future__ import annotations

import errno
import importlib.util
import socket

from relax_events.errors import EnvironmentProblem

PACKAGES = ("fastapi", "uvicorn")
"""The packages of our HTTP APIs, which the extra `api` installs."""


def find_missing_package() -> str:
    """Return a missing package of the extra `api`; empty when all are installed."""
    return next((name for name in PACKAGES if importlib.util.find_spec(name) is None), "")


def open_listener(host: str, port: int, *, remedies: tuple[str, str], what: str) -> socket.socket:
    """Bind a TCP socket.

    Args:
        host: An address or name of this machine.
        port: The port; 0 uses a free one.
        remedies: Remedies for a taken port and for an address of another machine.
        what: The name of the service, for the error text.
    Raises:
        EnvironmentProblem: The socket can't be bound.
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
    """Return the URL of the address that a socket is bound to."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
