"""A point in time by which several operations together must be done."""

from __future__ import annotations

import time

STALL_SECONDS = 1.0
"""A wait that ends so much later than it should means that this process was suspended."""


class Deadline:
    """A number of seconds from now, shared by all operations that receive this object."""

    def __init__(self, seconds: float) -> None:
        self._at = time.monotonic() + seconds

    @property
    def remaining_seconds(self) -> float:
        """The seconds that are left, never below zero."""
        return max(0.0, self._at - time.monotonic())

    def within(self, seconds: float) -> Deadline:
        """Return a deadline at most `seconds` from now that is never later than this one."""
        return Deadline(min(seconds, self.remaining_seconds))

    @property
    def passed(self) -> bool:
        """Whether no time is left."""
        return self.remaining_seconds == 0.0
