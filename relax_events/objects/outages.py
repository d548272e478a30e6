"""What a process does while an object store does not answer: a worker waits for it, everything else
fails at once.

A call that fails is made again after a pause, longer each time, until the store answers; the work
loop's thread sends heartbeats in the pauses. A store that is away for longer than the deadline ends
the worker with StoreUnavailable: whoever started it starts it again. So no record and no prompt
group pays for an outage.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import structlog

from relax_events.errors import StoreUnavailable

log = structlog.get_logger()
FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 30.0
ResultT = TypeVar("ResultT")


class Outages:
    """The stores that do not answer this process, and who waits for them. Safe to use from several
    threads.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin without patience: a call that fails is not tried again. `arm` changes that."""
        self._clock = clock
        self._deadline_seconds = 0.0
        self._pause: Callable[[float], None] = time.sleep
        self._unavailable_since: dict[str, float] = {}

    def start_waiting(self, *, deadline_seconds: float, pause: Callable[[float], None]) -> None:
        """Wait for stores from now on, until `disarm`.

        Args:
            deadline_seconds: A store that has been away for longer is given up.
            pause: Waits for so many seconds and sends heartbeats meanwhile, in any thread. What it
                raises ends the wait.
        """
        self._deadline_seconds, self._pause = deadline_seconds, pause

    def stop_waiting(self) -> None:
        """Wait no more: the process ends."""
        self._deadline_seconds = 0.0

    @property
    def seconds(self) -> float:
        """For how long the store that is away for the longest has not answered; 0 when all do."""
        return self._clock() - min(self._unavailable_since.values()) if self._unavailable_since else 0.0

    def call_until_available(self, root: str, call: Callable[[], ResultT]) -> ResultT:
        """Call a store until it answers.

        Args:
            root: URI of the store's top.
            call: Raises StoreUnavailable when it does not answer; anything else that it raises is
                an answer.
        Raises:
            StoreUnavailable: It has not answered for longer than the deadline, or nobody waits in
                this process.
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
            limit = f"objects.outage_deadline_seconds = {self._deadline_seconds:g}"
            raise StoreUnavailable(
                f"{error}; waited for {seconds:.0f} s ({limit}), so this worker ends and has "
                "to be started again"
            ) from error
        log.info(
            "objects.wait_started",
            store=root,
            away_seconds=round(seconds),
            pause_seconds=round(pause_seconds, 1),
            error=str(error),
        )
        self._pause(pause_seconds)

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
"""Those of this process: every store that it opens shares them."""
