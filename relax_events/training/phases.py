"""Where a step's time goes."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class PhaseTimer:
    """Seconds by phase of one step. What comes after the step's figures were written (its commit)
    counts to the next step.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._written: dict[str, float] = {}

    def snapshot(self) -> dict[str, float]:
        """Return the seconds so far, for the step's record."""
        self._written = dict(self.seconds)
        return self._written

    def next_step(self) -> PhaseTimer:
        """Return the next step's phases, with what this one spent since its figures were
        written.
        """
        following = PhaseTimer()
        following.seconds |= {
            phase: rest
            for phase, seconds in self.seconds.items()
            if self._written and (rest := seconds - self._written.get(phase, 0.0)) > 0
        }
        return following

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """Add the time spent inside to a phase."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[phase] += time.monotonic() - started
