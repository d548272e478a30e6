"""One point in time that all the work of a hand-over shares."""

from __future__ import annotations

import time


class Deadline:
    """Seconds that are left from now on, never below zero."""

    def __init__(self, seconds: float) -> None:
        self._at = time.monotonic() + seconds

    @property
    def remaining_seconds(self) -> float:
        """How long there is still."""
        return max(0.0, self._at - time.monotonic())

    def within(self, seconds: float) -> Deadline:
        """Give a deadline so many seconds from now, or this one where it is sooner."""
        return Deadline(min(seconds, self.remaining_seconds))

    @property
    def passed(self) -> bool:
        """Whether it is over."""
        return self.remaining_seconds == 0.0
