"""A server of OpenEnv on 127.0.0.1 whose observations are chosen by the action, as a server that is
not trusted could send them.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import orjson

RAW = "raw "
"""An action that begins so gets the rest of it as a message."""
HUGE, WELL = "huge", "well"
HUGE_BYTES = 60 << 20
SECONDS = 60.0


class HostileServer:
    """The server. An action that no observation has gets an honest one."""

    def __init__(self, observations: Mapping[str, Any]) -> None:
        self.url, self._observations = "", observations
        self._ready = threading.Event()

    async def _handle(self, connection: Any) -> None:
        from websockets.exceptions import ConnectionClosed

        with suppress(ConnectionClosed):  # the client refuses the observation
            await self._answer(connection)

    async def _answer(self, connection: Any) -> None:
        async for text in connection:
            message = orjson.loads(text)
            if message["type"] == "close":
                return
            name = message["data"].get("message", "")
            if name.startswith(RAW):
                await connection.send(name.removeprefix(RAW))
            elif name == HUGE:
                await connection.send("[" + " " * HUGE_BYTES + "]")
            else:
                observation = self._observations.get(name, {"text": WELL})
                reply = {"type": "observation", "data": {"observation": observation}}
                await connection.send(json.dumps(reply))

    async def _serve(self) -> None:
        from websockets.asyncio.server import serve

        self._end = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        async with serve(self._handle, "127.0.0.1", 0, max_size=None) as server:
            self.url = f"http://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}"
            self._ready.set()
            await self._end.wait()

    @contextmanager
    def running(self) -> Iterator[str]:
        """Serve in a thread, and give the address."""
        thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        thread.start()
        if not self._ready.wait(SECONDS):
            raise TimeoutError("the hostile server does not start")
        try:
            yield self.url
        finally:
            self._loop.call_soon_threadsafe(self._end.set)
            thread.join(SECONDS)
