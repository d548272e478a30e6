"""Waits for unavailable object stores: workers retry until a deadline, other processes fail at
once.

A failed call is repeated after growing pauses until the store responds; the work loop sends
heartbeats during the pauses. An outage beyond the deadline ends the worker with StoreUnavailable,
and its supervisor restarts it. So no record and no prompt group fails because of an outage.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import structlog

from relax_events.errors import StoreUnavailable

log = structlog.get_logger()
OUTAGE_DEADLINE_SECONDS = 14_400.0
"""Time that a worker waits for a store that does not answer, while it sends heartbeats; then it
ends with exit code 8 and is restarted."""
FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 30.0
ResultT = TypeVar("ResultT")


class Outages:
    """The object stores that are unavailable to this process. Thread-safe."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Create it without waiting: failed calls are not retried until `start_waiting`."""
        self._clock = clock
        self._deadline_seconds = 0.0
        self._pause: Callable[[float], None] = time.sleep
        self._pauses: dict[int, Callable[[float], None]] = {}
        """Of work loops by their threads: a process may have several."""
        self._unavailable_since: dict[str, float] = {}

    def start_waiting(self, *, deadline_seconds: float, pause: Callable[[float], None]) -> None:
        """Retry failed calls from now on, until `stop_waiting`; called by a work loop's thread.

        Args:
            deadline_seconds: The longest outage that is waited for.
            pause: Sleeps for the given seconds and sends heartbeats meanwhile, in any thread. An
                exception from it ends the wait.
        """
        self._deadline_seconds, self._pause = deadline_seconds, pause
        self._pauses[threading.get_ident()] = pause

    def stop_waiting(self) -> None:
        """Stop retrying, because the process ends."""
        self._deadline_seconds = 0.0

    @property
    def seconds(self) -> float:
        """The length of the longest current outage; 0 when all stores respond."""
        return (
            self._clock() - min(self._unavailable_since.values())
            if self._unavailable_since
            else 0.0
        )

    def call_until_available(self, root: str, call: Callable[[], ResultT]) -> ResultT:
        """Call a store until it responds.

        Args:
            root: The store's root URI.
            call: Raises StoreUnavailable when the store does not respond; any other exception
                counts as a response.
        Raises:
            StoreUnavailable: The outage exceeded the deadline, or this process does not wait.
        """
        for pause_seconds in _pauses():
            try:
                result = call()
            except StoreUnavailable as error:
                self._wait(root, error, pause_seconds)
            except BaseException:
                self._mark_available(root)
                raise
            else:
                self._mark_available(root)
                return result
        raise AssertionError("pauses never end")

    def _wait(self, root: str, error: StoreUnavailable, pause_seconds: float) -> None:
        if not self._deadline_seconds:
            raise error
        if root not in self._unavailable_since:
            log.warning(
                "objects.unavailable",
                store=root,
                error=str(error),
                deadline_seconds=self._deadline_seconds,
            )
        seconds = self._clock() - self._unavailable_since.setdefault(root, self._clock())
        if seconds + pause_seconds > self._deadline_seconds:
            raise StoreUnavailable(
                f"{error}; waited for {seconds:.0f} s of at most {self._deadline_seconds:g}, so "
                "this worker ends and has to be started again"
            ) from error
        log.info(
            "objects.wait_started",
            store=root,
            away_seconds=round(seconds),
            pause_seconds=round(pause_seconds, 1),
            error=str(error),
        )
        self._pauses.get(threading.get_ident(), self._pause)(pause_seconds)

    def _mark_available(self, root: str) -> None:
        if (since := self._unavailable_since.pop(root, None)) is not None:
            log.info("objects.available", store=root, away_seconds=round(self._clock() - since))


def _pauses() -> Iterator[float]:
    """Give ever longer pauses, jittered so that workers don't call all at once."""
    longest = FIRST_PAUSE_SECONDS
    while True:
        yield longest * random.uniform(0.5, 1.0)  # noqa: S311
        longest = min(2 * longest, LONGEST_PAUSE_SECONDS)


outages = Outages()
"""The outages of this process, shared by all its stores."""
