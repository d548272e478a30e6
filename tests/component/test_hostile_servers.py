"""An untrusted server of environments reads no file, leads nowhere else, and fails its own sample
only.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import orjson
import pytest

from relax_events.attacks.environment_server import HostileServer
from relax_events.attacks.servers import PIXEL, file_observations, wrong_observations
from relax_events.engines.protocol import EnvironmentContext
from relax_events.environments.interfaces.bounded_client import open_bounded_client
from relax_events.environments.interfaces.server_bounds import ServerBounds
from relax_events.environments.session_pool import EnvironmentSession, SessionPool
from relax_events.errors import EpisodeFailed, PoisonSample
from relax_events.events.parts import ChatMessage
from tests.environment_pools import pool_of

pytestmark = pytest.mark.component
SECONDS = 60.0
TOOL_PROGRAM = """
from mcp.server.mcpserver import MCPServer
server = MCPServer("hostile")

@server.tool()
def shout(number: int) -> str:
    return "a" * number

def make(name):
    def tool() -> str:
        return name
    tool.__doc__ = {description!r}
    server.tool(name=name)(tool)

for number in range({num_tools}):
    make(f"tool{{number}}")
server.run("stdio")
"""


def result_of(answer: Future[Any]) -> Any:
    return answer.result(SECONDS)


def session_of(pool: SessionPool) -> EnvironmentSession:
    message = ChatMessage.of_text("user", "begin")
    return pool.session("g0/0", EnvironmentContext(messages=[message], answer="", metadata="{}"))


@contextmanager
def sessions(pool: SessionPool, num: int) -> Iterator[list[EnvironmentSession]]:
    opened = [session_of(pool) for _ in range(num)]
    for session in opened:
        result_of(session.open())
    yield opened
    for session in opened:
        session.close()


def fail(pool: SessionPool, action: str) -> str:
    """Return how a step fails; a session that was open before still answers after it."""
    with sessions(pool, 2) as (attacked, other):
        with pytest.raises((EpisodeFailed, PoisonSample)) as caught:
            result_of(attacked.step(action))
        (reply,) = result_of(other.step("well")).replies
        assert reply.message.text == "well"
    return str(caught.value)


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret.png"
    path.write_bytes(b"c2VjcmV0")
    return path


def test_server_can_not_name_a_file_or_an_address(tmp_path: Path, secret: Path) -> None:
    observations = file_observations(secret)
    observations["good"] = {"image": PIXEL}
    server = HostileServer(observations)
    with (
        server.running() as address,
        pool_of(tmp_path, interface="openenv", address=address) as pool,
    ):
        for name in file_observations(secret):
            text = fail(pool, name)
            assert "paths and addresses in what a server sends are not read" in text, name
            assert "image" in text
            assert "c2VjcmV0" not in text
        with sessions(pool, 1) as (session,):
            (reply,) = result_of(session.step("good")).replies
            assert len(reply.media) == 1


def test_observation_of_a_wrong_form_fails_its_own_session(tmp_path: Path) -> None:
    observations = wrong_observations()
    server = HostileServer(observations)
    with (
        server.running() as address,
        pool_of(tmp_path, interface="openenv", address=address) as pool,
    ):
        for name in observations:
            assert fail(pool, name), name
        assert "more than 100 levels" in fail(pool, "deep")
        assert "at most 4194304 bytes" in fail(pool, "long text")
        assert "sent a message of more than" in fail(pool, "huge")
        for raw in ("", "{", "[]", "5", '"a"', "{}", '{"data": 5}', '{"data": []}', "\x00"):
            assert fail(pool, f"raw {raw}"), raw


def test_redirect_of_an_openenv_server_is_not_followed(tmp_path: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as inner,
        socket.create_server(("127.0.0.1", 0)) as outer,
    ):
        inner.setblocking(False)
        target, port = inner.getsockname()[1], outer.getsockname()[1]

        def redirect() -> None:
            connection, _ = outer.accept()
            with connection:
                connection.recv(65536)
                head = f"HTTP/1.1 302 Found\r\nLocation: ws://127.0.0.1:{target}/meta\r\n"
                connection.sendall(f"{head}Content-Length: 0\r\n\r\n".encode())

        thread = threading.Thread(target=redirect)
        thread.start()
        with pool_of(tmp_path, interface="openenv", address=f"http://127.0.0.1:{port}") as pool:
            session = session_of(pool)
            with pytest.raises(EpisodeFailed, match=r"no connection to ws://.*HTTP 302"):
                result_of(session.open())
            session.close()
        thread.join(SECONDS)
        with pytest.raises(BlockingIOError):
            inner.accept()


def tool_pool(folder: Path, *, num_tools: int, description: str = "d") -> Any:
    program = folder / "tools.py"
    program.write_text(TOOL_PROGRAM.format(num_tools=num_tools, description=description))
    servers = {"hostile": {"command": [sys.executable, str(program)]}}
    return pool_of(folder, interface="mcp", tool_servers=servers, timeout_seconds=SECONDS)


@pytest.mark.parametrize(
    ("num_tools", "description", "expected"),
    [(300, "d", "more than 256 tools"), (5, "d" * 2_000_000, "4194304 bytes")],
)
def test_tools_that_fill_the_prompt_are_refused(
    tmp_path: Path, num_tools: int, description: str, expected: str
) -> None:
    with tool_pool(tmp_path, num_tools=num_tools, description=description) as pool:
        session = session_of(pool)
        with pytest.raises(EpisodeFailed, match=expected):
            result_of(session.open())
        session.close()


def test_long_result_of_a_tool_fails_its_own_session(tmp_path: Path) -> None:
    def shout(number: int) -> str:
        call = {"name": "shout", "arguments": {"number": number}}
        return f"<tool_call>{orjson.dumps(call).decode()}</tool_call>"

    with tool_pool(tmp_path, num_tools=1) as pool, sessions(pool, 2) as (attacked, other):
        with pytest.raises(PoisonSample, match=r"at most 4194304 bytes"):
            result_of(attacked.step(shout(5 << 20)))
        assert result_of(other.step(shout(3))).replies[0].message.text == "aaa"


@pytest.mark.parametrize(
    ("head", "body", "expected"),
    [
        ("Content-Encoding: gzip\r\n", b"x", "packed its response"),
        ("", b"x" * 100_000, "sent more than 4000 bytes"),
    ],
)
def test_http_client_of_tool_servers_bounds_a_response(
    head: str, body: bytes, expected: str
) -> None:
    bounds = ServerBounds(
        max_reply_bytes=1000, max_item_bytes=1000, open_seconds=SECONDS, request_seconds=SECONDS
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                start = f"HTTP/1.1 200 OK\r\n{head}Content-Length: {len(body)}\r\n\r\n"
                connection.sendall(start.encode() + body)

        thread = threading.Thread(target=answer)
        thread.start()

        async def post() -> None:
            async with open_bounded_client(bounds) as client:
                await client.post(f"http://127.0.0.1:{listener.getsockname()[1]}/", content=b"{}")

        with pytest.raises(httpx2.HTTPError, match=expected):
            asyncio.run(post())
        thread.join(SECONDS)
