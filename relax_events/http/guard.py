"""The guard before the requests of every HTTP server.

    head --> Host, Origin --> identity --> bound of the body --> turn --> body --> values --> app
      421 or 403 ----'           |  401          |  413            | 429    | 408     | 413
                                 '-- unread: the connection is closed

It acts before the body is read: the Host header must name this server (against DNS rebinding), the
request must not come from a page of another origin, and it must have an identity. Then the body is
read completely, within the bound of this identity and a time limit, when it is the call's turn. The
application finds the identity in the request's state and looks no key up again.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from relax_events.http.call_queue import CallQueue, QueueFull, Turn
from relax_events.http.identity import SMALL_BODY_BYTES, Identify, Identity, RequestHead

STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)
SEPARATORS = (b",", b"[", b"{")
"""Before each value but the first stands such a separator, or the colon of a member behind it."""

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Problem = Callable[[RequestHead, int, str], bytes]
"""Builds the body of a refusal from the request's head, the status and the reason."""
PAGE = b"text/html; charset=utf-8"
JSON = b"application/json"

LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
EVERYWHERE = frozenset({"", "0.0.0.0", "::"})  # noqa: S104 compared, not bound
BODY_SECONDS = 10.0
CALL_SECONDS = 60.0
IDENTITY, CONNECTION = "identity", "connection"
"""Keys of a request's state."""
LENGTH = re.compile("[0-9]{1,18}")
DENIED = "no token, or the wrong one; send `Authorization: Bearer TOKEN`"


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardLimits:
    """Times that a call may take.

    Attributes:
        body_seconds: For receiving the body.
        call_seconds: From the head to the end of the answer, a streamed one included.
    """

    body_seconds: float = BODY_SECONDS
    call_seconds: float = CALL_SECONDS


class _Refusal(Exception):
    """A request that is not answered: the status and why."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status, self.text = status, text


class RequestGuard:
    """ASGI middleware; see the module's docstring."""

    def __init__(
        self,
        app: App,
        *,
        identify: Identify,
        problem: Problem,
        host: str,
        limits: GuardLimits = GuardLimits(),
        denied: str = DENIED,
        page: Problem | None = None,
        is_any_host: bool = False,
    ) -> None:
        """Wrap an application.

        Args:
            app: The application that handles accepted requests.
            identify: Returns who makes a request.
            problem: Builds the JSON body of a refusal, in the API's format.
            host: The address that the server listens on.
            limits: Times that a call may take.
            denied: The text of a refusal for want of an identity.
            page: Builds the HTML body of a refusal for browsers that open a page.
            is_any_host: Whether a server on a wildcard address accepts any Host header; only for
                servers whose requests all need a secret that no browser sends by itself.
        """
        self._app, self._identify, self._problem, self._page = app, identify, problem, page
        self._limits, self._denied = limits, denied
        is_open = host in EVERYWHERE and is_any_host
        self._hosts = None if is_open else LOOPBACK | {host, socket.gethostname().lower()}
        self._queue = CallQueue()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        call = _Call(scope, receive, send)
        head = RequestHead.from_scope(scope)
        deadline = asyncio.timeout(self._limits.call_seconds)
        try:
            async with deadline:
                await self._handle(call, head)
        except _Refusal as refusal:
            await self._refuse(call, head, refusal.status, refusal.text)
        except TimeoutError:
            if not deadline.expired():
                raise
            seconds = self._limits.call_seconds
            await self._refuse(call, head, 504, f"the call took more than {seconds:g} s")

    async def _handle(self, call: _Call, head: RequestHead) -> None:
        self._check_origin(head.headers)
        if (identity := self._identify(head)) is None:
            raise _Refusal(401, self._denied)
        num_bytes = _check_length(head.headers, identity)
        call.identify(identity)
        try:
            async with self._queue.turn(identity, num_bytes) as turn:
                await self._answer(call, turn)
        except QueueFull:
            raise _Refusal(429, "too many calls with this key wait; try again later") from None

    async def _answer(self, call: _Call, turn: Turn) -> None:
        """Read the body of a call, and have the application answer it."""
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                body = await call.read_body(turn.identity)
        except TimeoutError:
            seconds = self._limits.body_seconds
            raise _Refusal(408, f"the body did not arrive within {seconds:g} s") from None
        max_values = turn.identity.body.num_values
        if len(body) > SMALL_BODY_BYTES and await asyncio.to_thread(
            has_more_values, body, max_values
        ):
            raise _Refusal(413, f"the body has more than {max_values} JSON values")
        await self._app(call.scope, call.replay(body, turn), call.answer(turn))

    def _check_origin(self, headers: Mapping[str, str]) -> None:
        """Refuse a request to another name, or of a page of another origin."""
        host = headers.get("host", "")
        if self._hosts is not None and _parse_host_name(host) not in self._hosts:
            raise _Refusal(
                421,
                f"this server is not {ascii(host)[:100]}; call it by the address that it "
                "listens on",
            )
        origin = headers.get("origin")
        is_foreign = origin is not None and origin.partition("://")[2] != host
        if is_foreign or headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            raise _Refusal(403, "a page of another origin may not call this API")

    async def _refuse(self, call: _Call, head: RequestHead, status: int, text: str) -> None:
        """Send a refusal, and close the connection with the unread part of the body."""
        if call.has_answer:
            call.hang_up()
            return
        is_page = self._page is not None and "text/html" in head.headers.get("accept", "")
        build = self._page if self._page is not None and is_page else self._problem
        body = build(head, status, text)
        headers = [
            (b"content-type", PAGE if is_page else JSON),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        headers += [(b"www-authenticate", b"Bearer")] if status == 401 and not is_page else []
        headers += [(b"retry-after", b"1")] if status == 429 else []
        await call.send({"type": "http.response.start", "status": status, "headers": headers})
        await call.send({"type": "http.response.body", "body": body})


@dataclass(slots=True)
class _Call:
    """A request on its way through the guard."""

    scope: Scope
    receive: Receive
    send: Send
    has_answer: bool = field(default=False)

    def identify(self, identity: Identity) -> None:
        """Note whose request it is, for the application and for the connection."""
        state = self.scope.setdefault("state", {})
        connection = state.get(CONNECTION)
        if connection is not None and not connection.identify(identity):
            raise _Refusal(429, f"this key has its {identity.max_connections} connections")
        state[IDENTITY] = identity

    def hang_up(self) -> None:
        """Close the connection."""
        if (connection := self.scope["state"].get(CONNECTION)) is not None:
            connection.hang_up()

    async def read_body(self, identity: Identity) -> bytes:
        """Read the whole body."""
        parts: list[bytes] = []
        size = 0
        while True:
            message = await self.receive()
            if message["type"] != "http.request":
                return b""
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > identity.body.num_bytes:
                raise _Refusal(413, f"the body has more than {identity.body.num_bytes} bytes")
            if not message.get("more_body", False):
                return b"".join(parts)

    def replay(self, body: bytes, turn: Turn) -> Receive:
        """Return a receive function that first returns the body, then later messages: an
        application that asks for them has parsed the body.
        """
        parts = [body]

        async def receive() -> Message:
            if parts:
                return {"type": "http.request", "body": parts.pop(), "more_body": False}
            turn.release_body()
            return await self.receive()

        return receive

    def answer(self, turn: Turn) -> Send:
        """Return a send function that notes that there is an answer."""

        async def send(message: Message) -> None:
            self.has_answer = True
            turn.release_body()
            await self.send(message)

        return send


def _check_length(headers: Mapping[str, str], identity: Identity) -> int:
    """Return how many bytes a body has at most.

    Raises:
        _Refusal: It is malformed, compressed, or more than the identity's calls need.
    """
    length, bound = headers.get("content-length", "0"), identity.body.num_bytes
    if headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        raise _Refusal(415, "the body must not be compressed; send it without Content-Encoding")
    if not LENGTH.fullmatch(length):
        raise _Refusal(400, "Content-Length must be a number of at most 18 digits")
    if int(length) > bound:
        raise _Refusal(413, f"the body has {int(length)} bytes, at most {bound} may be")
    return bound if "transfer-encoding" in headers else int(length)


def _parse_host_name(host: str) -> str:
    """Return the host name of a Host header, without the port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower()


def has_more_values(text: bytes, max_values: int) -> bool:
    """Return whether a JSON text has more values than a bound; a member of an object is one.

    The time is linear in the text. Text that is not JSON is counted alike.

    Args:
        text: The text, which need not be valid.
        max_values: The bound.
    """
    if _count_separators(text, 0, len(text)) < max_values:
        return False  # commas in strings are counted here: the usual text is done
    num_values, end = 1, 0
    for string in STRING.finditer(text):
        num_values += _count_separators(text, end, string.start())
        if num_values > max_values:
            return True
        end = string.end()
    return num_values + _count_separators(text, end, len(text)) > max_values


def _count_separators(text: bytes, start: int, end: int) -> int:
    return sum(text.count(one, start, end) for one in SEPARATORS)
