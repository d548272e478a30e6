"""A bounded queue before an engine: by priority, then by arrival; what finds it full is refused.

caller  enter(priority) --> waiting, by priority --> running, at most `max_running` --> leave
            |
            +--> QueueFull when `max_waiting` callers wait: HTTP 429 with Retry-After
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count


class QueueFull(Exception):
    """The queue holds as many callers as it may; the caller may try again later."""

    def __init__(self, retry_after_seconds: int, text: str) -> None:
        super().__init__(text)
        self.retry_after_seconds = retry_after_seconds


@dataclass(slots=True, order=True)
class _Waiting:
    priority: int
    order: int
    turn: asyncio.Future[None] = field(compare=False)


class RequestQueue:
    """Admits callers of one event loop; see the module's docstring."""

    def __init__(self, *, max_running: int, max_waiting: int, retry_after_seconds: int = 1) -> None:
        """Create an empty queue.

        Args:
            max_running: Callers inside at the same time.
            max_waiting: Callers that wait for their turn.
            retry_after_seconds: Seconds after which a refused caller may try again.
        """
        self._max_running, self._max_waiting = max_running, max_waiting
        self._retry_after_seconds = retry_after_seconds
        self._order = count()
        self._heap: list[_Waiting] = []
        self.num_running = self.num_waiting = 0

    @asynccontextmanager
    async def enter(self, priority: int = 0) -> AsyncIterator[None]:
        """Wait for the turn, and hold it during the block.

        Args:
            priority: Lower ones come first.
        Raises:
            QueueFull: `max_waiting` callers wait already.
        """
        if self.num_running < self._max_running and not self.num_waiting:
            self.num_running += 1
        else:
            await self._wait(priority)
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, priority: int) -> None:
        if self.num_waiting >= self._max_waiting:
            raise QueueFull(
                self._retry_after_seconds,
                f"{self.num_running} requests run and {self.num_waiting} wait, the most that this "
                f"server takes; try again in {self._retry_after_seconds} s",
            )
        turn = asyncio.get_running_loop().create_future()
        heapq.heappush(self._heap, _Waiting(priority, next(self._order), turn))
        self.num_waiting += 1
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._pass_on()  # its turn had come already
            else:
                self.num_waiting -= 1
            raise

    def _pass_on(self) -> None:
        """Give a place to the first waiting caller that is still there."""
        while self._heap:
            first = heapq.heappop(self._heap)
            if not first.turn.done():
                self.num_waiting -= 1
                first.turn.set_result(None)
                return
        self.num_running -= 1
