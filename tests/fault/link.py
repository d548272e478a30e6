"""A bad network between clients and a broker: a relay on the loopback interface that can be slow,
silent, cut or down."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Callable
from typing import Self

from relax_events.kafka.embedded.ports import HOST, choose_port

CHUNK_BYTES = 16_384
NUM_UNDER_WAY = 64
"""Chunks in one direction of a connection; more wait in the sender."""
ORDER_SECONDS = 10.0
ABORT = struct.pack("ii", 1, 0)
"""Linger for no time: closing sends a reset."""


class Link:
    """Relays connections from a port of its own to another, in the state that the test sets.

    A silent link loses nothing that TCP would not send again: what was sent meanwhile arrives when
    it speaks again. As a context manager it relays from entry to exit.
    """

    def __init__(
        self,
        target_port: int,
        *,
        port: int | None = None,
        admits: Callable[[int], bool] | None = None,
    ) -> None:
        self.port = port or choose_port(taken=frozenset({target_port}))
        self.target_port = target_port
        self._admits = admits
        """Whether a client at this port gets an answer; asked once for each connection."""
        self.latency_seconds = 0.0
        """On each way."""
        self.bytes_per_second = float("inf")
        """Of all connections together, on each way."""
        self._speaks = asyncio.Event()
        self._lanes = (asyncio.Lock(), asyncio.Lock())
        self._server: asyncio.Server | None = None
        self._sockets: set[socket.socket] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name=f"link-{self.port}", daemon=True
        )

    @property
    def address(self) -> str:
        """Where clients connect."""
        return f"{HOST}:{self.port}"

    def __enter__(self) -> Self:
        self._thread.start()
        self.heal()
        return self

    def __exit__(self, *_: object) -> None:
        self._order(self._close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(ORDER_SECONDS)
        self._loop.close()

    def fall_silent(self) -> None:
        """Stop relaying, without closing connections; new ones are accepted."""
        self._loop.call_soon_threadsafe(self._speaks.clear)

    def reset(self) -> int:
        """End every connection by a reset, and return how many there were; new ones are taken."""
        num_open = len(self._tasks)
        self._loop.call_soon_threadsafe(self._abort)
        return num_open

    def go_down(self) -> None:
        """End every connection and refuse new ones."""
        self._order(self._stop)

    def heal(self) -> None:
        """Be a good link again."""
        self.latency_seconds, self.bytes_per_second = 0.0, float("inf")
        self._loop.call_soon_threadsafe(self._speaks.set)
        self._order(self._serve)

    def _order(self, step: Callable[[], asyncio.Future[None]]) -> None:
        asyncio.run_coroutine_threadsafe(step(), self._loop).result(ORDER_SECONDS)

    async def _serve(self) -> None:
        if self._server is None:
            self._server = await asyncio.start_server(self._relay, HOST, self.port)

    async def _stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        self._abort()

    async def _close(self) -> None:
        await self._stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _abort(self) -> None:
        for end in self._sockets:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ABORT)
        for task in self._tasks:
            task.cancel()

    async def _relay(
        self, from_client: asyncio.StreamReader, to_client: asyncio.StreamWriter
    ) -> None:
        task = asyncio.current_task()
        self._tasks.add(task)
        ends = [to_client]
        try:
            self._sockets.add(to_client.get_extra_info("socket"))
            if self._admits and not await asyncio.to_thread(
                self._admits, to_client.get_extra_info("peername")[1]
            ):
                while await from_client.read(CHUNK_BYTES):
                    pass
                return
            from_target, to_target = await asyncio.open_connection(HOST, self.target_port)
            ends.append(to_target)
            self._sockets.add(to_target.get_extra_info("socket"))
            ways = [
                self._carry(from_client, to_target, self._lanes[0]),
                self._carry(from_target, to_client, self._lanes[1]),
            ]
            running = [asyncio.ensure_future(way) for way in ways]
            try:
                await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in running:
                    way.cancel()
                await asyncio.gather(*running, return_exceptions=True)
        except (OSError, asyncio.CancelledError):
            pass  # the target is away, or the link was ordered to end this connection
        finally:
            self._tasks.discard(task)
            for end in ends:
                self._sockets.discard(end.get_extra_info("socket"))
                end.transport.abort()

    async def _carry(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, lane: asyncio.Lock
    ) -> None:
        """Carry one way until one end closes."""
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(NUM_UNDER_WAY)
        delivery = asyncio.ensure_future(self._deliver(under_way, sink, lane))
        try:
            while chunk := await source.read(CHUNK_BYTES):
                await under_way.put((self._loop.time(), chunk))
            await under_way.put((self._loop.time(), b""))
            await delivery
        finally:
            delivery.cancel()
            await asyncio.gather(delivery, return_exceptions=True)

    async def _deliver(
        self,
        under_way: asyncio.Queue[tuple[float, bytes]],
        sink: asyncio.StreamWriter,
        lane: asyncio.Lock,
    ) -> None:
        while True:
            sent_at, chunk = await under_way.get()
            await asyncio.sleep(max(0.0, sent_at + self.latency_seconds - self._loop.time()))
            await self._speaks.wait()
            if not chunk:
                return
            async with lane:
                await asyncio.sleep(len(chunk) / self.bytes_per_second)
            sink.write(chunk)
            await sink.drain()
