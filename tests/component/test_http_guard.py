"""The guard of our HTTP APIs: which requests it rejects before it reads them, and how little an
unauthorized request costs.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import uvicorn

from relax_events.attacks.http_requests import Target, slow_attacks
from relax_events.attacks.http_sender import send
from relax_events.deadline import Deadline
from relax_events.http import server as http_guard
from relax_events.http.guard import GuardLimits, RequestGuard
from relax_events.http.identity import BodyBound, Identity, identify_by_token, read_identity
from relax_events.http.server import build_server_config, open_listener

TOKEN = "of-this-run"
MAX_BYTES = 1000
HASTY = GuardLimits(body_seconds=0.3)
SLOW, STREAM = b"never answered", b"answered without an end"
CALLER = Identity(name="token", body=BodyBound(num_bytes=MAX_BYTES))
Headers = dict[str, str]


class Echo:
    """Responds with the body's length, and counts requests."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.callers: list[Identity] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.num_calls += 1
        self.callers.append(read_identity(scope))
        message = await receive()
        if message["body"] == SLOW:
            await asyncio.Event().wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if message["body"] == STREAM:
            await send({"type": "http.response.body", "body": b"begun", "more_body": True})
            await asyncio.Event().wait()
        await send({"type": "http.response.body", "body": str(len(message["body"])).encode()})


class Served:
    def __init__(self, port: int, echo: Echo) -> None:
        self.port, self.echo = port, echo

    def call(self, headers: Headers, *, method: str = "POST", body: bytes = b"") -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, "/", body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def raw(self, head: str) -> str:
        """Send the head of a request without a body; return the response until the server closes
        the connection."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as connection:
            connection.sendall(head.encode())
            return b"".join(iter(lambda: connection.recv(4096), b"")).decode()


@pytest.fixture
def serve() -> Iterator[Any]:
    running: list[tuple[uvicorn.Server, threading.Thread, socket.socket]] = []

    def start(
        *, host: str = "127.0.0.1", token: str = TOKEN, limits: GuardLimits | None = None
    ) -> Served:
        echo = Echo()
        problem = lambda _, status, text: json.dumps([status, text]).encode()  # noqa: E731
        guard = RequestGuard(
            echo,
            problem=problem,
            host=host,
            identify=identify_by_token(token, CALLER),
            limits=limits or GuardLimits(),
            is_any_host=bool(token),
        )
        listener = open_listener("127.0.0.1", 0, remedies=("", ""), what="a test")
        listener.listen()
        server = uvicorn.Server(build_server_config(guard, lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        running.append((server, thread, listener))
        return Served(listener.getsockname()[1], echo)

    yield start
    for server, thread, listener in running:
        server.should_exit = True
        thread.join()
        listener.close()


BEARER = {"Authorization": f"Bearer {TOKEN}"}


def test_authorized_call_is_forwarded_unchanged(serve: Any) -> None:
    assert serve().call(BEARER, body=b"x" * MAX_BYTES) == (200, str(MAX_BYTES))


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer"}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": f"Basic {TOKEN}"}, 401),
        ({"Authorization": "Bearer \xe4"}, 401),
        (BEARER | {"Host": "evil.example.com"}, 421),
        (BEARER | {"Host": "127.0.0.1.evil.example.com"}, 421),
        (BEARER | {"Host": ""}, 421),
        (BEARER | {"Origin": "http://evil.example.com"}, 403),
        (BEARER | {"Origin": "null"}, 403),
        (BEARER | {"Sec-Fetch-Site": "cross-site"}, 403),
        (BEARER | {"Sec-Fetch-Site": "same-site"}, 403),
    ],
)
def test_cross_origin_or_unauthorized_call_is_rejected(
    serve: Any, headers: Headers, status: int
) -> None:
    served = serve()
    code, text = served.call(headers)
    assert (code, json.loads(text)[0], served.echo.num_calls) == (status, status, 0)


def test_same_origin_page_may_call_the_server(serve: Any) -> None:
    served = serve()
    assert (
        served.call(
            BEARER | {"Origin": f"http://127.0.0.1:{served.port}", "Sec-Fetch-Site": "same-origin"}
        )[0]
        == 200
    )
    assert served.call(BEARER | {"Host": f"localhost:{served.port}"})[0] == 200
    assert served.call(BEARER | {"Host": "[::1]:1"})[0] == 200


def test_token_is_checked_before_a_body_is_read(serve: Any) -> None:
    """The body is never sent: the rejection does not wait for it."""
    served = serve()
    head = "POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999999999\r\n\r\n"
    assert served.raw(head).startswith("HTTP/1.1 401 ")


@pytest.mark.parametrize("framing", ["Content-Length: 1001", "Transfer-Encoding: chunked"])
def test_body_that_is_too_large_is_refused(serve: Any, framing: str) -> None:
    served = serve()
    head = (
        f"POST / HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n{framing}\r\n\r\n"
    )
    chunks = "400\r\n" + "x" * 1024 + "\r\n" if "chunked" in framing else ""
    assert served.raw(head + chunks).startswith("HTTP/1.1 413 ")
    assert not served.echo.num_calls


def test_request_body_that_does_not_arrive_times_out(serve: Any) -> None:
    served = serve(limits=HASTY)
    head = (
        f"POST / HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: "
        "10\r\n\r\nhalf"
    )
    assert served.raw(head).startswith("HTTP/1.1 408 ")


def test_connection_without_a_request_is_closed(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_guard, "HEAD_SECONDS", 0.3)
    assert serve().raw("POST / HTTP/1.1\r\nHost:") == ""


def test_idle_connections_leave_room_for_callers(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More connections than the server has, without a head, of which the first ones make room."""
    monkeypatch.setattr(http_guard, "HEAD_SECONDS", 600.0)
    served = serve()
    with ExitStack() as stack:
        for _ in range(http_guard.MAX_CONNECTIONS + 1):
            address = ("127.0.0.1", served.port)
            stack.enter_context(socket.create_connection(address, timeout=60))
        deadline = Deadline(60.0)
        while (status := served.call(BEARER)[0]) != 200:
            assert not deadline.passed, status


def test_application_is_given_the_identity(serve: Any) -> None:
    served = serve()
    served.call(BEARER)
    assert served.echo.callers == [CALLER]


def test_call_that_takes_too_long_is_ended(serve: Any) -> None:
    """Before its answer by a refusal, within its answer by the end of the connection."""
    served = serve(limits=GuardLimits(call_seconds=5.0))
    status, text = served.call(BEARER, body=SLOW)
    assert (status, json.loads(text)[1]) == (504, "the call took more than 5 s")
    with pytest.raises(http.client.IncompleteRead) as cut:
        served.call(BEARER, body=STREAM)
    assert cut.value.partial == b"begun"
    assert served.call(BEARER)[0] == 200


@pytest.mark.parametrize("attack", range(3))
def test_slow_requests_are_ended(serve: Any, monkeypatch: pytest.MonkeyPatch, attack: int) -> None:
    monkeypatch.setattr(http_guard, "HEAD_SECONDS", 0.3)
    served = serve(limits=HASTY)
    target = Target("localhost", "/", f"Authorization: Bearer {TOKEN}", MAX_BYTES)
    slow = slow_attacks(target)[attack]
    assert send(slow, port=served.port).status in slow.statuses
    assert served.echo.num_calls == 0


def test_server_on_all_addresses_accepts_any_host_name_if_token_is_required(serve: Any) -> None:
    assert serve(host="0.0.0.0").call(BEARER | {"Host": "node-7.cluster"})[0] == 200
    assert serve(host="0.0.0.0", token="").call({"Host": "node-7.cluster"})[0] == 421
