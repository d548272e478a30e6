"""The environments of `misbehaving` as a run file names them, and a server of OpenEnv's protocol."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
from websockets.asyncio.server import ServerConnection, serve

from tests.component.gateway_agents import write_program
from tests.misbehaving import NUM_TURNS, SLOW_SECONDS

FILE = Path(__file__).parent / "misbehaving.py"
PROGRAM = f"""
from runpy import run_path
misbehave = run_path({str(FILE)!r})["misbehave"]
for turn in range({NUM_TURNS}):
    messages.append(say(messages))
    how = task["metadata"].get("how", "") if turn == 1 else ""
    messages.append({{"role": "user", "content": misbehave(how)}})
"""


async def misbehave(socket: ServerConnection, how: str) -> None:
    """Do in a connection of OpenEnv's what a row names."""
    if how == "kill":
        socket.transport.abort()
    if how in ("hang", "flood"):
        await socket.wait_closed()
    if how == "slow":
        await asyncio.sleep(SLOW_SECONDS)
    if how == "raise":
        error = {"message": "it broke", "code": "EXECUTION_ERROR"}
        await socket.send(orjson.dumps({"type": "error", "data": error}).decode())


async def handle(socket: ServerConnection) -> None:
    """Serve a session of OpenEnv's protocol."""
    turn, how = 0, ""
    async for text in socket:
        message = orjson.loads(text)
        if message["type"] == "close":
            return
        if message["type"] == "reset":
            how = message["data"].get("how", "")
        else:
            turn += 1
            if turn == 2:
                await misbehave(socket, how)
        said = "x" * 8 * 2**20 if turn == 2 and how == "reply" else "next"
        data = {"observation": {"text": said}, "reward": 1.0, "done": turn == NUM_TURNS}
        await socket.send(orjson.dumps({"type": "observation", "data": data}).decode())


@contextmanager
def openenv_server() -> Iterator[str]:
    """Serve sessions in a thread; yield the address."""
    loop, ready, addresses = asyncio.new_event_loop(), threading.Event(), []
    ended = asyncio.Event()

    async def run() -> None:
        async with serve(handle, "127.0.0.1", 0, close_timeout=1) as server:
            addresses.append(f"http://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}")
            ready.set()
            await ended.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(run()))
    thread.start()
    assert ready.wait(60)
    try:
        yield addresses[0]
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()
        loop.close()


def environment_of(kind: str, folder: Path, address: str) -> dict[str, Any]:
    """Return the section of a kind of environment."""
    if kind == "program":
        return {"command": write_program(folder, PROGRAM)}
    if kind == "mcp":
        server = {"command": [sys.executable, "-I", "-S", str(FILE)]}
        return {"interface": "mcp", "tool_servers": {"tests": server}}
    if kind == "openenv":
        return {"interface": "openenv", "address": address, "options": {"text_field": "text"}}
    name = "respond" if kind == "function" else kind.capitalize()
    return {"interface": kind, "function": f"{FILE}:{name}", "processes": 2}
