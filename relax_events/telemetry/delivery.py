"""Delivers items to an external service from its own thread and bounded queue: failures are counted
and do not affect the worker.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

import structlog

log = structlog.get_logger()
MAX_QUEUED = 10_000
BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 1.0, 60.0
GIVEN_UP_SECONDS = 900.0
"""An item that the service does not accept for so long is dropped, so that later items are
delivered."""
Item = TypeVar("Item")


class DeliveryQueue(Generic[Item]):
    """The queue and thread of one service. `put` never blocks; `close` waits at most for its
    timeout.
    """

    def __init__(
        self,
        name: str,
        deliver: Callable[[Item], None],
        *,
        close: Callable[[], None] = lambda: None,
        failed: Callable[[str], None],
    ) -> None:
        """Start the thread.

        Args:
            name: The service's name.
            deliver: Delivers one item, in the queue's thread; after any exception it is called
                again.
            close: Called in the queue's thread at the end.
            failed: Called with the name for each error, from any thread.
        """
        self.name = name
        self._deliver, self._close, self._failed = deliver, close, failed
        self._queue: deque[Item] = deque()
        self._num_unfinished = 0
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"feed {name}", daemon=True)
        self._thread.start()

    def put(self, item: Item) -> None:
        """Queue an item; drop and count it if the queue is full."""
        with self._changed:
            if len(self._queue) < MAX_QUEUED:
                self._queue.append(item)
                self._num_unfinished += 1
                self._changed.notify()
                return
        self._fail("delivery.dropped", error=f"{MAX_QUEUED} wait already")

    def close(self, *, timeout_seconds: float) -> bool:
        """Try to deliver each queued item at most once more; return whether the thread ended in
        time.
        """
        self._closing.set()
        with self._changed:
            self._changed.notify()
        self._thread.join(timeout_seconds)
        if self.is_running:
            self._fail("delivery.abandoned", error=f"it did not end within {timeout_seconds:.0f} s")
        return not self.is_running

    @property
    def is_running(self) -> bool:
        """Whether the thread is running."""
        return self._thread.is_alive()

    @property
    def is_idle(self) -> bool:
        """Whether every item was delivered or dropped."""
        with self._changed:
            return not self._num_unfinished

    def _run(self) -> None:
        while (item := self._next()) is not None:
            if not self._deliver_with_retries(item) and self._closing.is_set():
                break  # later items would fail as well
            with self._changed:
                self._num_unfinished -= 1
        self._try(self._close)

    def _next(self) -> Item | None:
        """Wait for the next item; None when the queue is empty and closing."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing.is_set())
            return self._queue.popleft() if self._queue else None

    def _deliver_with_retries(self, item: Item) -> bool:
        """Deliver an item, retrying with growing pauses; return whether it was delivered."""
        pause, given_up_at = BACKOFF_SECONDS, time.monotonic() + GIVEN_UP_SECONDS
        while not self._try(lambda: self._deliver(item)):
            if time.monotonic() > given_up_at or self._closing.wait(pause):
                return False
            pause = min(2 * pause, MAX_BACKOFF_SECONDS)
        return True

    def _try(self, action: Callable[[], None]) -> bool:
        try:
            action()
        # External libraries and networks may raise any exception.
        except Exception as error:
            self._fail("delivery.failed", error=f"{type(error).__name__}: {error}")
            return False
        return True

    def _fail(self, event: str, *, error: str) -> None:
        self._failed(self.name)
        log.warning(event, service=self.name, error=error)
