"""Coroutines that other threads run in an event loop, so that closing the loop's owner can cancel
them all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")


class CancellableTasks:
    """The running coroutines of one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run nothing yet.

        Args:
            loop: Runs the coroutines, in a thread of its own.
        """
        self._loop = loop
        self._tasks: set[asyncio.Task[Any]] = set()

    def run(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Run a coroutine in the loop, from any thread."""
        return asyncio.run_coroutine_threadsafe(self._tracked(work), self._loop)

    async def cancel(self) -> None:
        """Cancel all, and wait until they have ended; called in the loop."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _tracked(self, work: Coroutine[Any, Any, Result]) -> Result:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            return await work
        finally:
            self._tasks.discard(task)
