"""Threads that render for sessions, which take turns: no session waits for another's long text.

    session A  A A A  --.
    session B  B      --+--> one of each at a time, in turn --> thread 1 .. n
    session C  C C    --'

A tokenizer needs some 500 bytes for each byte of text, so one long text is rendered at a time.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from relax_events.data.rendering import PromptRenderer
from relax_events.errors import EngineFailed

Result = TypeVar("Result")
NUM_THREADS = 4
"""Renderings at once: a tokenizer lets other threads run."""
LONG_TEXT_BYTES = 1024**2
RENDER_SECONDS = 60.0
"""Deadline of a rendering, with its wait for a thread."""


@dataclass(slots=True, eq=False)
class _Work:
    """What one call wants rendered."""

    run: Callable[[], Any]
    is_long: bool
    done: asyncio.Future[Any] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class RenderQueue:
    """See the module's docstring. It is used in one event loop."""

    def __init__(self, num_threads: int, *, seconds: float = RENDER_SECONDS) -> None:
        """Start no thread yet.

        Args:
            num_threads: Renderings at once, of different sessions.
            seconds: Deadline of a rendering, with its wait.
        """
        self._seconds, self._num_free = seconds, num_threads
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="session-renderer")
        self._waiting: OrderedDict[object, deque[_Work]] = OrderedDict()
        self._running: set[object] = set()
        self._runs_long = False

    @classmethod
    def of_renderer(cls, renderer: PromptRenderer) -> RenderQueue:
        """Return a queue with as many threads as a renderer may have."""
        return cls(NUM_THREADS if renderer.may_share_threads else 1)

    async def run(self, owner: object, work: Callable[[], Result], *, num_bytes: int = 0) -> Result:
        """Run something in a thread when it is the owner's turn.

        Args:
            owner: The session; it has one thread at most, also after a deadline has passed.
            work: What to run.
            num_bytes: Of the text.
        Raises:
            EngineFailed: The deadline has passed; the same call may succeed later.
        """
        item = _Work(work, num_bytes > LONG_TEXT_BYTES)
        self._waiting.setdefault(owner, deque()).append(item)
        self._start_work()
        try:
            async with asyncio.timeout(self._seconds):
                result: Result = await item.done
                return result
        except TimeoutError:
            raise EngineFailed(
                f"the messages were not rendered within {self._seconds:g} s; send fewer calls of "
                "this session at once, or shorter messages"
            ) from None
        finally:
            self._forget(owner, item)

    def close(self) -> None:
        """Stop the threads after the work that they have begun."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _start_work(self) -> None:
        for owner in list(self._waiting):
            if not self._num_free:
                return
            waits_for_long = self._waiting[owner][0].is_long and self._runs_long
            if owner not in self._running and not waits_for_long:
                self._start(owner)

    def _start(self, owner: object) -> None:
        queue = self._waiting[owner]
        item = queue.popleft()
        self._waiting.move_to_end(owner)
        if not queue:
            del self._waiting[owner]
        self._running.add(owner)
        self._runs_long = self._runs_long or item.is_long
        self._num_free -= 1
        loop = asyncio.get_running_loop()
        running = loop.run_in_executor(self._threads, item.run)
        running.add_done_callback(lambda ended: self._end(owner, item, ended))

    def _end(self, owner: object, item: _Work, ended: asyncio.Future[Any]) -> None:
        self._running.discard(owner)
        self._runs_long = self._runs_long and not item.is_long
        self._num_free += 1
        if ended.cancelled():
            item.done.cancel()
        elif (error := ended.exception()) is not None:
            if not item.done.done():
                item.done.set_exception(error)
        elif not item.done.done():
            item.done.set_result(ended.result())
        self._start_work()

    def _forget(self, owner: object, item: _Work) -> None:
        """Take the work of a call that is gone out of the queue."""
        queue = self._waiting.get(owner)
        if queue is not None and item in queue:
            queue.remove(item)
            if not queue:
                del self._waiting[owner]
