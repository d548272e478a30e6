"""Environments of tests that misbehave in the second of three turns, each as its row names, in
every form that this library knows. Child processes run this file, so it imports nothing of the
tests; it is a tool server by itself, and the beginning of a program.

hang    never answers
kill    ends its process, or its connection
flood   prints 16 MB, and then hangs
reply   says 8 MB
slow    answers late, within the deadline
raise   fails
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from types import SimpleNamespace
from typing import Any

FAULTS = ("hang", "kill", "flood", "reply", "slow", "raise")
NUM_TURNS = 3
HANG_SECONDS, SLOW_SECONDS = 600.0, 0.3
NEXT = "next"


def misbehave(how: str) -> str:
    """Do what a row names; return what is said then."""
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raise":
        raise ConnectionError("the simulator is gone")
    if how == "flood":
        for _ in range(64):
            print("x" * 2**18, flush=True)
    if how in ("hang", "flood"):
        time.sleep(HANG_SECONDS)
    if how == "slow":
        time.sleep(SLOW_SECONDS)
    return "x" * 8 * 2**20 if how == "reply" else NEXT


def respond(completion: str, *, messages: list[dict[str, Any]], metadata: dict[str, Any]) -> Any:
    """Answer a turn, as a function."""
    turn = 1 + sum(message["role"] == "assistant" for message in messages)
    if turn == NUM_TURNS:
        return None
    return misbehave(metadata.get("how", "")) if turn == 2 else NEXT


class Gymnasium:
    """An ordinary environment with a state."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.how, self.turn = (options or {}).get("how", ""), 0
        return "begin", {}

    def step(self, action: str) -> Any:
        self.turn += 1
        said = misbehave(self.how) if self.turn == 2 else NEXT
        return said, 1.0, self.turn == NUM_TURNS, False, {}


class Interaction:
    """An asynchronous environment; what it does blocks its event loop."""

    def __init__(self, sample: SimpleNamespace) -> None:
        self.how, self.turn = sample.metadata.get("how", ""), 0

    def reset(self) -> Any:
        return {}, {}

    async def step(self, response_text: str) -> Any:
        self.turn += 1
        await asyncio.sleep(0)
        said = misbehave(self.how) if self.turn == 2 else NEXT
        return {"obs_str": said}, self.turn == NUM_TURNS, {"reward": 1.0}


def serve_tools() -> None:
    """Serve one tool over stdio, by the protocol of MCP."""
    tool = {"name": "act", "inputSchema": {"type": "object"}}
    for line in sys.stdin:
        message = json.loads(line)
        if "id" not in message:
            continue
        answer: dict[str, Any] = {"jsonrpc": "2.0", "id": message["id"]}
        if message["method"] == "initialize":
            answer["result"] = {
                "protocolVersion": message["params"]["protocolVersion"],
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "tests", "version": "1"},
            }
        elif message["method"] == "tools/list":
            answer["result"] = {"tools": [tool]}
        elif message["method"] == "tools/call":
            said = misbehave(message["params"]["arguments"]["how"])
            answer["result"] = {"content": [{"type": "text", "text": said}]}
        else:
            answer["error"] = {"code": -32601, "message": "Method not found"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve_tools()
