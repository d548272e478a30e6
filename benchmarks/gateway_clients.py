"""The programs of `benchmarks.gateway`, in a process of their own: argv has the gateway's address and
port; stdin has JSON, one key a session. Each session asks turn after turn, with a history that grows.
The seconds of each call go to stdout.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

TURNS = 6
START_SECONDS = 10.0
"""Over which the sessions begin."""
PROMPT = "Read the files, then say what to change. " * 60
RESULT = "def f(a, b):\n    return a + b  # one of many lines of a file\n" * 30
TOOL = {
    "name": "read",
    "description": "Read a file.",
    "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
}
HEAD = "POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {key}\r\n"


async def post(host: str, port: int, key: str, body: bytes) -> dict[str, Any]:
    """Call the gateway, on a connection of its own as most clients' first call has it."""
    reader, writer = await asyncio.open_connection(host, port)
    head = HEAD.format(host=f"{host}:{port}", key=key)
    head += (
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n"
    )
    writer.write(head.encode() + b"\r\n" + body)
    await writer.drain()
    answer = await reader.read()
    writer.close()
    status, _, rest = answer.partition(b"\r\n")
    assert b" 200 " in status, answer
    found: dict[str, Any] = json.loads(rest.partition(b"\r\n\r\n")[2])
    return found


async def talk(host: str, port: int, key: str, delay: float) -> list[float]:
    """Have one session, and return the seconds of its calls."""
    await asyncio.sleep(delay)
    messages: list[dict[str, Any]] = [{"role": "user", "content": PROMPT}]
    tools, seconds = [{"type": "function", "function": TOOL}], []
    for _ in range(TURNS):
        body = json.dumps({"model": "any", "messages": messages, "tools": tools}).encode()
        began = time.perf_counter()
        answer = await post(host, port, key, body)
        seconds.append(time.perf_counter() - began)
        messages += [answer["choices"][0]["message"], {"role": "user", "content": RESULT}]
    return seconds


async def main(host: str, port: int, keys: list[str]) -> None:
    """Have all sessions at the same time."""
    delays = [START_SECONDS * number / len(keys) for number in range(len(keys))]
    talks = (talk(host, port, key, delay) for key, delay in zip(keys, delays, strict=True))
    print(json.dumps(await asyncio.gather(*talks)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), json.load(sys.stdin)))
