"""The server side of every HTTP API: its listening socket, its settings, and its connections; and
the base of the small text servers.
"""

from __future__ import annotations

import asyncio
import errno
import importlib.util
import socket
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import Any

from relax_events.errors import EnvironmentProblem
from relax_events.http.guard import CONNECTION, App
from relax_events.http.identity import Identity
from relax_events.http.tls import TlsFiles

MAX_UNIDENTIFIED = 64
"""Connections that have sent no request of a known identity yet."""
GRACE_SECONDS = 1.0
"""So long such a connection may stay, however many there are: clients that connect together."""

PACKAGES = ("fastapi", "uvicorn")
"""The packages of our HTTP APIs, which the extra `api` installs."""


class ConnectionTable:
    """The connections of a server."""

    def __init__(self) -> None:
        self.unidentified: dict[Connection, None] = {}
        self.by_identity: Counter[str] = Counter()

    def make_room(self, *, now: float) -> None:
        """Close the oldest connections without an identity if there are too many."""
        excess = len(self.unidentified) - MAX_UNIDENTIFIED
        for connection in list(self.unidentified)[: max(0, excess)]:
            if now - connection.opened_at < GRACE_SECONDS:
                return
            connection.hang_up()


class Connection:
    """An open connection."""

    def __init__(self, table: ConnectionTable, close: Callable[[], None], *, now: float) -> None:
        """Enter the table.

        Args:
            table: Of the server.
            close: Closes it.
            now: The event loop's time.
        """
        self._table, self._close, self._name = table, close, ""
        self.opened_at = now
        table.unidentified[self] = None
        table.make_room(now=now)

    def identify(self, identity: Identity) -> bool:
        """Note whose requests come over it; return whether the identity may have one more."""
        if self._name == identity.name:
            return True
        if self._table.by_identity[identity.name] >= identity.max_connections:
            return False
        self.forget()
        self._name = identity.name
        self._table.by_identity[identity.name] += 1
        return True

    def hang_up(self) -> None:
        """Close it."""
        self.forget()
        self._close()

    def forget(self) -> None:
        """Leave the table."""
        self._table.unidentified.pop(self, None)
        if self._name:
            self._table.by_identity[self._name] -= 1
            if not self._table.by_identity[self._name]:
                del self._table.by_identity[self._name]
            self._name = ""


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


def build_url(listener: socket.socket, *, tls: TlsFiles | None = None) -> str:
    """Return the URL of the address that a socket is bound to."""
    host, port = listener.getsockname()[:2]
    scheme = "http" if tls is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


class TextHandler(BaseHTTPRequestHandler):
    """Sends text responses; closes connections that are silent for `timeout` seconds."""

    timeout = 10

    def respond(
        self, status: int, body: bytes, *, content_type: str = "text/plain; charset=utf-8"
    ) -> None:
        """Send a complete response."""
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002
        """Disable the access log."""


HEAD_SECONDS = 10.0
MAX_CONNECTIONS = 256


def build_server_config(
    app: App,
    *,
    max_connections: int = MAX_CONNECTIONS,
    tls: TlsFiles | None = None,
    **settings: Any,
) -> Any:
    """Return uvicorn's configuration for a guarded application: bounded connections, a deadline for
    request headers, and encryption if there is a certificate.
    """
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol

    table = ConnectionTable()

    class Protocol(H11Protocol):
        """Closes a connection that sends no complete request headers in time, and shows the guard
        the connection of each request.
        """

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            """Start the timer."""
            super().connection_made(transport)
            self._connection = Connection(table, transport.close, now=self.loop.time())
            self.app_state = self.app_state | {CONNECTION: self._connection}
            self._late = self.loop.call_later(HEAD_SECONDS, self._hang_up)

        def _hang_up(self) -> None:
            if self.cycle is None and self.transport is not None:
                self.transport.close()

        def connection_lost(self, exc: Exception | None) -> None:
            """Stop the timer."""
            self._late.cancel()
            self._connection.forget()
            super().connection_lost(exc)

    return uvicorn.Config(
        app,
        http=Protocol,
        ws="none",
        limit_concurrency=max_connections,
        log_config=None,
        access_log=False,
        server_header=False,
        **({} if tls is None else tls.server_settings),
        **settings,
    )
