"""Which call is next, and what an identity and the server hold at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

import pytest

from relax_events.http import call_queue
from relax_events.http.call_queue import CallQueue, QueueFull, Turn
from relax_events.http.identity import SMALL_BODY_BYTES, BodyBound, Identity

LARGE = 10 * SMALL_BODY_BYTES


def caller(name: str, *, max_calls: int = 1, max_bytes: int = 2 * LARGE) -> Identity:
    """Return an identity."""
    body = BodyBound(num_bytes=LARGE)
    return Identity(name=name, body=body, max_calls=max_calls, max_bytes=max_bytes)


class Calls:
    """Calls of a queue, which run until they are ended."""

    def __init__(self, queue: CallQueue) -> None:
        self._queue, self.started = queue, list[str]()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ends: dict[str, asyncio.Event] = {}
        self.turns: dict[str, Turn] = {}

    async def begin(self, name: str, identity: Identity, num_bytes: int = 0) -> None:
        """Let a call wait for its turn."""
        self._ends[name] = asyncio.Event()
        self._tasks[name] = asyncio.ensure_future(self._run(name, identity, num_bytes))
        await self.settle()

    async def _run(self, name: str, identity: Identity, num_bytes: int) -> None:
        async with self._queue.turn(identity, num_bytes) as turn:
            self.turns[name] = turn
            self.started.append(name)
            await self._ends[name].wait()

    async def end(self, *names: str) -> None:
        """End calls, one after the other."""
        for name in names:
            self._ends[name].set()
            await self._tasks[name]
            await self.settle()

    async def cancel(self, name: str) -> None:
        """Cancel a call, as when its client is gone."""
        self._tasks[name].cancel()
        with suppress(asyncio.CancelledError):
            await self._tasks[name]
        await self.settle()

    async def settle(self) -> None:
        """Let all that can start do so."""
        for _ in range(10):
            await asyncio.sleep(0)


def test_identities_take_turns_and_one_has_no_more_than_its_budget() -> None:
    async def run() -> Sequence[str]:
        calls, many, one = Calls(CallQueue()), caller("many"), caller("one")
        for number in range(4):
            await calls.begin(f"many {number}", many)
        await calls.begin("one 0", one)
        assert calls.started == ["many 0", "one 0"]
        await calls.end("many 0", "many 1", "one 0", "many 2", "many 3")
        return calls.started

    expected = ["many 0", "one 0", "many 1", "many 2", "many 3"]
    assert asyncio.run(run()) == expected


def test_large_bodies_share_the_budget_of_the_server_in_turn() -> None:
    async def run() -> None:
        calls = Calls(CallQueue(total_bytes=LARGE))
        for name in ("a", "b", "c"):
            await calls.begin(f"{name} 0", caller(name, max_calls=9), LARGE)
            await calls.begin(f"{name} 1", caller(name, max_calls=9), LARGE)
        await calls.begin("b small", caller("b", max_calls=9), SMALL_BODY_BYTES)
        assert calls.started == ["a 0", "b small"], "a small body waits for no large one"
        for name in ("a 0", "a 1", "b 0", "c 0"):
            calls.turns[name].release_body()
            await calls.settle()
        assert calls.started == ["a 0", "b small", "a 1", "b 0", "c 0", "b 1"]
        await calls.end("a 0", "b small", "a 1", "b 0", "c 0", "b 1", "c 1")

    asyncio.run(run())


def test_large_bodies_of_one_identity_count_until_they_are_answered() -> None:
    async def run() -> None:
        calls, one = Calls(CallQueue()), caller("a", max_calls=9)
        for number in range(3):
            await calls.begin(f"{number}", one, LARGE)
            if f"{number}" in calls.turns:
                calls.turns[f"{number}"].release_body()
        await calls.begin("small", one)
        assert calls.started == ["0", "1", "small"]
        await calls.end("0", "1", "2", "small")
        assert calls.started == ["0", "1", "small", "2"]

    asyncio.run(run())


def test_cancelled_call_returns_its_budget() -> None:
    async def run() -> None:
        calls, one = Calls(CallQueue(total_bytes=LARGE)), caller("a")
        for name in ("first", "waiting", "last"):
            await calls.begin(name, one, LARGE)
        await calls.cancel("waiting")
        await calls.cancel("first")
        assert calls.started == ["first", "last"]
        await calls.end("last")
        await calls.begin("again", one, LARGE)
        assert calls.started[-1] == "again"
        await calls.end("again")

    asyncio.run(run())


def test_identity_with_too_many_waiting_calls_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_queue, "MAX_WAITING", 2)

    async def run() -> None:
        queue = CallQueue()
        calls = Calls(queue)
        for number in range(3):
            await calls.begin(f"{number}", caller("a"))
        with pytest.raises(QueueFull):
            async with queue.turn(caller("a"), 0):
                pass
        async with queue.turn(caller("b"), 0):
            pass
        await calls.end("0", "1", "2")

    asyncio.run(run())
