"""An event loop in a thread of its own, whose coroutines other threads start."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")
CLOSE_SECONDS = 30.0


class LoopThread:
    """See the module's docstring; `close` cancels the coroutines and ends the thread."""

    def __init__(self, name: str) -> None:
        """Start the thread.

        Args:
            name: Of the thread.
        """
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Run a coroutine in the loop, from any thread. Coroutines begin in the order of these
        calls, each before the next one continues from its first wait.
        """
        return asyncio.run_coroutine_threadsafe(self._tracked(work), self._loop)

    def close(self, last: Coroutine[Any, Any, None] | None = None) -> None:
        """Cancel all coroutines, wait until they have ended, and end the thread.

        Args:
            last: Run after that, as the last of the loop.
        """
        if not self._thread.is_alive():
            if last is not None:
                last.close()
            return
        stopping = asyncio.run_coroutine_threadsafe(self._stop(last), self._loop)
        try:
            stopping.result(CLOSE_SECONDS)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CLOSE_SECONDS)

    async def _tracked(self, work: Coroutine[Any, Any, Result]) -> Result:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            return await work
        finally:
            self._tasks.discard(task)

    async def _stop(self, last: Coroutine[Any, Any, None] | None) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if last is not None:
            await last

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()
