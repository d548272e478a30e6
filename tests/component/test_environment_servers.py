"""Sessions with servers: MCP servers as tools, by the official package, and a server that speaks
the WebSocket protocol of OpenEnv.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
from websockets.asyncio.server import ServerConnection, serve

from relax_events.engines.protocol import EnvironmentContext
from relax_events.environments.interfaces.openenv import build_url
from relax_events.environments.session_pool import EnvironmentSession, SessionPool
from relax_events.errors import ConfigError, EpisodeFailed, EpisodeLate, SessionLost
from relax_events.events.parts import ChatMessage
from relax_events.http.server import open_listener
from tests.environment_pools import pool_of

SERVER = Path(__file__).parents[1] / "tool_server.py"
SECONDS = 60.0


def session_of(
    pool: SessionPool, name: str = "g0/0", metadata: dict[str, Any] | None = None
) -> EnvironmentSession:
    task = EnvironmentContext(
        messages=[ChatMessage.of_text("user", "begin")],
        answer="red",
        metadata=orjson.dumps(metadata or {}).decode(),
    )
    return pool.session(name, task)


def result_of(answer: Future[Any]) -> Any:
    return answer.result(SECONDS)


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def texts(observation: Any) -> list[str]:
    return [reply.message.text for reply in observation.replies]


@contextmanager
def http_server() -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    listener = open_listener("127.0.0.1", 0, remedies=(), what="a test")
    port = listener.getsockname()[1]
    listener.close()
    process = subprocess.Popen([sys.executable, str(SERVER), str(port)])
    try:
        yield f"http://127.0.0.1:{port}/mcp", process
    finally:
        process.kill()
        process.wait()


def open_when_ready(pool: SessionPool, name: str) -> tuple[EnvironmentSession, Any]:
    deadline = time.monotonic() + SECONDS
    while True:
        session = session_of(pool, name)
        try:
            return session, result_of(session.open())
        except EpisodeFailed:
            session.close()
            assert time.monotonic() < deadline
            time.sleep(0.2)


def test_mcp_tools_are_shown_called_and_answered_with_a_state_for_each_sample(
    tmp_path: Path,
) -> None:
    servers = {"tests": {"command": [sys.executable, str(SERVER)]}}
    with pool_of(tmp_path, interface="mcp", tool_servers=servers, timeout_seconds=SECONDS) as pool:
        one, other = session_of(pool), session_of(pool, "g0/1")
        openings = [one.open(), other.open()]
        tools = orjson.loads(result_of(openings[0]).tools)
        result_of(openings[1])
        assert [tool["function"]["name"] for tool in tools] == ["add", "show", "die"]
        assert tools[0]["function"]["parameters"]["properties"]["number"]["type"] == "integer"
        assert texts(result_of(one.step(call("add", number=2)))) == ["total 2"]
        twice = result_of(one.step(call("add", number=3) + call("add", number=4)))
        assert texts(twice) == ["total 5", "total 9"]
        assert [reply.message.role for reply in twice.replies] == ["tool", "tool"]
        assert texts(result_of(other.step(call("add", number=1)))) == ["total 1"]
        (shown,) = result_of(one.step(call("show"))).replies
        assert len(shown.media) == 1
        assert "validation error" in texts(result_of(one.step(call("add", number="x"))))[0]
        assert "there is no tool 'sub'" in texts(result_of(one.step(call("sub"))))[0]
        assert "is not JSON" in texts(result_of(one.step("<tool_call>{</tool_call>")))[0]
        over = result_of(one.step("the answer"))
        assert over.is_over
        assert over.reward is None
        one.close()
        other.close()


def test_mcp_server_that_dies_fails_the_episode_and_not_the_policy(tmp_path: Path) -> None:
    servers = {"tests": {"command": [sys.executable, str(SERVER)]}}
    with pool_of(tmp_path, interface="mcp", tool_servers=servers, timeout_seconds=SECONDS) as pool:
        session = session_of(pool)
        result_of(session.open())
        with pytest.raises(EpisodeFailed, match="the server of tool 'die' is gone"):
            result_of(session.step(call("die", folder=str(tmp_path))))
        session.close()
        again = session_of(pool)
        result_of(again.open())
        assert texts(result_of(again.step(call("die", folder=str(tmp_path))))) == ["alive"]
        again.close()


def test_mcp_server_over_http_is_used_and_its_death_fails_the_episode(tmp_path: Path) -> None:
    with http_server() as (address, process):
        settings = {"interface": "mcp", "tool_servers": {"tests": {"address": address}}}
        with pool_of(tmp_path, **settings, timeout_seconds=SECONDS) as pool:
            session, opening = open_when_ready(pool, "g0/0")
            assert len(orjson.loads(opening.tools)) == 3
            assert texts(result_of(session.step(call("add", number=2)))) == ["total 2"]
            process.kill()
            process.wait()
            with pytest.raises(EpisodeFailed):
                result_of(session.step(call("add", number=2)))
            session.close()


def test_mcp_program_that_does_not_exist_is_rejected_at_startup(tmp_path: Path) -> None:
    servers = {"tests": {"command": ["/no/such/program"]}}
    with (
        pytest.raises(ConfigError, match=r"tool_servers\.tests\.command: there is no program"),
        pool_of(tmp_path, interface="mcp", tool_servers=servers),
    ):
        pass


class EchoServer:
    """The messages of OpenEnv's WebSocket: `reset`, `step`, `state` and `close`."""

    def __init__(self) -> None:
        self.resets: list[dict[str, Any]] = []
        self.num_closed = 0
        self.url = ""
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()

    async def handle(self, socket: ServerConnection) -> None:
        count = 0
        async for text in socket:
            message = orjson.loads(text)
            if message["type"] == "close":
                self.num_closed += 1
                return
            if message["type"] == "reset":
                self.resets.append(message["data"])
                said = {"observation": {"text": f"seed {message['data']['seed']}"}, "done": False}
            elif message["data"].get("message") == "crash":
                error = {"message": "it broke", "code": "EXECUTION_ERROR"}
                await socket.send(orjson.dumps({"type": "error", "data": error}).decode())
                continue
            elif message["data"].get("message") == "hang":
                await asyncio.sleep(SECONDS)
            elif "message" not in message["data"]:
                error = {"message": "Invalid", "code": "VALIDATION_ERROR", "errors": ["message"]}
                await socket.send(orjson.dumps({"type": "error", "data": error}).decode())
                continue
            else:
                count += 1
                text = f"{message['data']['message']} {count}"
                said = {"observation": {"text": text}, "reward": 0.5 * count, "done": count == 2}
            await socket.send(orjson.dumps({"type": "observation", "data": said}).decode())

    def run(self) -> None:
        async def main() -> None:
            async with serve(self.handle, "127.0.0.1", 0) as server:
                port = next(iter(server.sockets)).getsockname()[1]
                self.url = f"http://127.0.0.1:{port}"
                self._ready.set()
                await self._end.wait()

        self._end = asyncio.Event()
        self._loop.run_until_complete(main())
        self._loop.close()

    @contextmanager
    def running(self) -> Iterator[str]:
        thread = threading.Thread(target=self.run)
        thread.start()
        assert self._ready.wait(SECONDS)
        try:
            yield self.url
        finally:
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._end.set)
            thread.join(SECONDS)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_openenv_server_is_reset_stepped_and_closed_for_each_sample(tmp_path: Path) -> None:
    server = EchoServer()
    options = {"text_field": "text", "reset": {"level": 3}}
    with (
        server.running() as address,
        pool_of(tmp_path, interface="openenv", address=address, options=options) as pool,
    ):
        session = session_of(pool, metadata={"seed": 5, "reset": {"map": "a"}})
        opening = result_of(session.open())
        assert [reply.message.text for reply in opening.messages] == ["seed 5"]
        assert server.resets == [{"seed": 5, "episode_id": "g0/0", "level": 3, "map": "a"}]
        first = result_of(session.step("go"))
        assert (texts(first), first.reward, first.is_over) == (["go 1"], 0.5, False)
        last = result_of(session.step("go"))
        assert (texts(last), last.reward, last.is_over) == ([], 1.0, True)
        session.close()
        wait_until(lambda: server.num_closed == 1)


def test_openenv_mistake_of_the_policy_is_answered_and_a_failing_server_fails_the_episode(
    tmp_path: Path,
) -> None:
    server = EchoServer()
    options = {"text_field": "text", "actions": "json"}
    settings = {"interface": "openenv", "options": options, "timeout_seconds": SECONDS}
    with server.running() as address, pool_of(tmp_path, address=address, **settings) as pool:
        session = session_of(pool)
        result_of(session.open())
        assert "is not the JSON of an object" in texts(result_of(session.step("no")))[0]
        assert "Invalid" in texts(result_of(session.step('{"text": "no"}')))[0]
        assert texts(result_of(session.step('{"message": "a"}'))) == ["a 1"]
        with pytest.raises(EpisodeFailed, match="EXECUTION_ERROR: it broke"):
            result_of(session.step('{"message": "crash"}'))
        session.close()


def test_openenv_session_that_is_late_ends_alone_and_is_known_once_it_runs_alone(
    tmp_path: Path,
) -> None:
    server = EchoServer()
    text = r"took longer than 10 s \(environment.timeout_seconds\)"
    settings = {"interface": "openenv", "options": {"text_field": "text", "actions": "json"}}
    with (
        server.running() as address,
        pool_of(tmp_path, address=address, timeout_seconds=10.0, **settings) as pool,
    ):
        session, neighbour = session_of(pool), session_of(pool, "g0/1")
        result_of(session.open())
        result_of(neighbour.open())
        with pytest.raises(SessionLost, match=text) as caught:
            result_of(session.step('{"message": "hang"}'))
        assert caught.value.is_suspect
        assert texts(result_of(neighbour.step('{"message": "a"}'))) == ["a 1"]
        again = pool.session(session.sample_id, session.task, runs_alone=True)
        result_of(again.open())
        with pytest.raises(EpisodeLate, match=text):
            result_of(again.step('{"message": "hang"}'))
        for one in (session, neighbour, again):
            one.close()


def test_openenv_server_that_is_gone_fails_the_episode(tmp_path: Path) -> None:
    server = EchoServer()
    with (
        server.running() as address,
        pool_of(tmp_path, interface="openenv", address=address) as pool,
    ):
        session = session_of(pool)
        result_of(session.open())
        server._loop.call_soon_threadsafe(server._end.set)
        wait_until(server._loop.is_closed)
        with pytest.raises(EpisodeFailed, match="is gone"):
            result_of(session.step("go"))
        other = session_of(pool, "g0/1")
        with pytest.raises(EpisodeFailed, match="no connection to ws://"):
            result_of(other.open())
        session.close()
        other.close()


def test_openenv_address_becomes_that_of_its_websocket() -> None:
    assert build_url("http://host:8000") == "ws://host:8000/ws"
    assert build_url("https://host/env/") == "wss://host/env/ws"
    assert build_url("ws://host/ws") == "ws://host/ws"
    with pytest.raises(ConfigError, match="must begin with http"):
        build_url("host:8000")
