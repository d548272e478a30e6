"""The server side of every HTTP API: its listening socket, its settings, and the guard before its
requests; and the base of the small text servers.

The guard acts before the body is read: the Host header must name this server (against DNS
rebinding), the request must not come from a page of another origin, and the token must match. Then
the body is read completely, within a size and time limit.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import importlib.util
import re
import socket
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from http.server import BaseHTTPRequestHandler
from typing import Any

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


Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]
Problem = Callable[[int, str], bytes]

LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
EVERYWHERE = frozenset({"", "0.0.0.0", "::"})  # noqa: S104 compared, not bound
BODY_SECONDS = 10.0
HEAD_SECONDS = 10.0
MAX_CONNECTIONS = 64
LENGTH = re.compile("[0-9]{1,18}")
DENIED = "no token, or the wrong one; send `Authorization: Bearer TOKEN`"


class RequestGuard:
    """ASGI middleware that refuses unauthorized and oversized requests."""

    def __init__(
        self,
        app: App,
        *,
        problem: Problem,
        host: str,
        token: str = "",
        max_body_bytes: int = 64 * 1024,
        body_seconds: float = BODY_SECONDS,
    ) -> None:
        """Wrap an application.

        Args:
            app: The application that handles accepted requests.
            problem: Builds the JSON body of a refusal from status and text, in the API's format.
            host: The address that the server listens on. With a token and a wildcard address, any
                Host header is accepted.
            token: The required bearer token; empty accepts requests without one.
            max_body_bytes: The maximal size of a body.
            body_seconds: The time limit for receiving a body.
        """
        self._app, self._problem, self._token = app, problem, token.encode()
        self._hosts = (
            None if host in EVERYWHERE and token else LOOPBACK | {host, socket.gethostname()}
        )
        self._max_body_bytes, self._body_seconds = max_body_bytes, body_seconds

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Handle a request, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {
            name.decode("latin-1").lower(): value.decode("latin-1")
            for name, value in scope["headers"]
        }
        refusal = self._find_refusal(headers)
        body = b""
        if refusal is None:
            try:
                body = await asyncio.wait_for(self._read_body(receive), self._body_seconds)
            except TimeoutError:
                refusal = 408, f"the body did not arrive within {self._body_seconds:g} s"
            except _TooLargeError:
                refusal = 413, f"the body has more than {self._max_body_bytes} bytes"
        if refusal is not None:
            await self._refuse(send, *refusal)
            return
        await self._app(scope, _replay_body(body, receive), send)

    def _find_refusal(self, headers: Mapping[str, str]) -> tuple[int, str] | None:
        host = headers.get("host", "")
        if self._hosts is not None and _parse_host_name(host) not in self._hosts:
            return (
                421,
                (
                    f"this server is not {ascii(host)[:100]}; call it by the address that it "
                    "listens on"
                ),
            )
        origin = headers.get("origin")
        if (origin is not None and origin.partition("://")[2] != host) or headers.get(
            "sec-fetch-site", "none"
        ) not in ("none", "same-origin"):
            return 403, "a page of another origin may not call this API"
        if self._token and not hmac.compare_digest(
            headers.get("authorization", "").encode("latin-1"), b"Bearer " + self._token
        ):
            return 401, DENIED
        length = headers.get("content-length", "0")
        if not LENGTH.fullmatch(length):
            return 400, "Content-Length must be a number of at most 18 digits"
        if int(length) > self._max_body_bytes:
            return 413, f"the body has {int(length)} bytes, at most {self._max_body_bytes} may be"
        return None

    async def _read_body(self, receive: Receive) -> bytes:
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return b""
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._max_body_bytes:
                raise _TooLargeError
            if not message.get("more_body", False):
                return b"".join(parts)

    async def _refuse(self, send: Send, status: int, text: str) -> None:
        body = self._problem(status, text)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        headers += [(b"www-authenticate", b"Bearer")] if status == 401 else []
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


class _TooLargeError(Exception):
    """A request body is too large."""


def _parse_host_name(host: str) -> str:
    """Return the host name of a Host header, without the port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower()


def _replay_body(body: bytes, receive: Receive) -> Receive:
    """Return a receive function that first returns the body that was read, then later messages."""
    is_given = False

    async def again() -> Message:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


def build_server_config(
    app: App, *, max_connections: int = MAX_CONNECTIONS, **settings: Any
) -> Any:
    """Return uvicorn's configuration for a guarded application: bounded connections, and a deadline
    for request headers.
    """
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Protocol(H11Protocol):
        """Closes a connection that sends no complete request headers in time."""

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            """Start the timer."""
            super().connection_made(transport)
            self._late = self.loop.call_later(HEAD_SECONDS, self._hang_up)

        def _hang_up(self) -> None:
            if self.cycle is None and self.transport is not None:
                self.transport.close()

        def connection_lost(self, exc: Exception | None) -> None:
            """Stop the timer."""
            self._late.cancel()
            super().connection_lost(exc)

    return uvicorn.Config(
        app,
        http=Protocol,
        limit_concurrency=max_connections,
        log_config=None,
        access_log=False,
        server_header=False,
        **settings,
    )
