"""Long calls that a work loop is inside of, each with a name and a deadline of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class Activity:
    """A long call. `started` is a time of the monotonic clock, as is `progressed`: when it last got on, from which the deadline counts."""

    name: str
    started: float
    progressed: float
    deadline_seconds: float

    @property
    def seconds(self) -> float:
        """For how long it has run."""
        return time.monotonic() - self.started

    @property
    def deadline(self) -> float:
        """When it counts as hung, by the monotonic clock."""
        return self.progressed + self.deadline_seconds

    @property
    def is_overdue(self) -> bool:
        """Whether its deadline has passed."""
        return time.monotonic() > self.deadline


class Activities:
    """The calls that the work loop is inside of, outermost first. One thread enters and leaves them; any thread may ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stack: list[Activity] = []

    @contextmanager
    def during(self, name: str, *, deadline_seconds: float) -> Iterator[None]:
        """Declare a long call for the length of the block.

        Args:
            name: What the worker does, as people read it: "publish weights".
            deadline_seconds: After how long without progress the call counts as hung.
        """
        now = time.monotonic()
        activity = Activity(name, now, now, deadline_seconds)
        with self._lock:
            self._stack.append(activity)
        try:
            yield
        finally:
            with self._lock:
                self._stack = [other for other in self._stack if other is not activity]

    def renew(self) -> None:
        """Note that the innermost call gets on: its deadline counts from now."""
        with self._lock:
            if self._stack:
                self._stack[-1].progressed = time.monotonic()

    @property
    def current(self) -> Activity | None:
        """The call that is overdue, the outermost first; else the innermost one, and None between calls."""
        with self._lock:
            stack = list(self._stack)
        overdue = (activity for activity in stack if activity.is_overdue)
        return next(overdue, stack[-1] if stack else None)
