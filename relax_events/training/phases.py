"""Measures the time of a step's phases."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class PhaseTimer:
    """Seconds by phase of one step. Time after the snapshot (the commit) is the next step's."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._snapshot: dict[str, float] = {}

    def snapshot(self) -> dict[str, float]:
        """Return the seconds so far, for the step's record."""
        self._snapshot = dict(self.seconds)
        return self._snapshot

    def next_step(self) -> PhaseTimer:
        """Return the next step's timer, with the time that this step spent after its snapshot."""
        following = PhaseTimer()
        following.seconds |= {
            phase: rest
            for phase, seconds in self.seconds.items()
            if self._snapshot and (rest := seconds - self._snapshot.get(phase, 0.0)) > 0
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
