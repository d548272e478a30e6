"""Feeds a tracker in a thread of its own, behind a bounded queue: one that is down, slow or broken costs a counted error and nothing else."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

import structlog

from relax_events.config import RunConfig
from relax_events.errors import ConfigError
from relax_events.plugins import TRACKERS, find_plugin
from relax_events.telemetry.trackers.memory import Memory
from relax_events.telemetry.trackers.protocol import Figures, Tracker

log = structlog.get_logger()
MAX_QUEUED = 10_000
BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 1.0, 60.0
GIVEN_UP_SECONDS = 900.0
"""After which figures that a tracker does not take are dropped, so that those behind them get their turn."""


class TrackerFeed:
    """One tracker. `put` never waits; `close` waits for no longer than it is told."""

    def __init__(self, name: str, open_tracker: Callable[[Memory], Tracker], *, memory: Memory, failed: Callable[[str], None]) -> None:
        """Start the thread; the tracker is opened with the first figures.

        Args:
            name: Of the tracker.
            open_tracker: Makes it.
            memory: Of what it was given before.
            failed: Called with its name for each error, from any thread.
        """
        self.name = name
        self._open, self._memory, self._failed = open_tracker, memory, failed
        self._queue: deque[Figures] = deque()
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._tracker: Tracker | None = None
        self._thread = threading.Thread(target=self._run, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def put(self, figures: Figures) -> None:
        """Queue figures; where too many wait, they are dropped and counted."""
        with self._changed:
            if len(self._queue) < MAX_QUEUED:
                self._queue.append(figures)
                self._changed.notify()
                return
        self._fail("figures.dropped", error=f"{MAX_QUEUED} wait already")

    def close(self, *, timeout_seconds: float) -> bool:
        """Let what is queued go out, each once more at the most, and tell whether the tracker came to an end in time."""
        self._closing.set()
        with self._changed:
            self._changed.notify()
        self._thread.join(timeout_seconds)
        if self.is_running:
            self._fail("tracker.abandoned", error=f"it did not end within {timeout_seconds:.0f} s")
        return not self.is_running

    @property
    def is_running(self) -> bool:
        """Whether the tracker has not come to an end."""
        return self._thread.is_alive()

    def _run(self) -> None:
        while (figures := self._next()) is not None:
            if not self._deliver(figures) and self._closing.is_set():
                break  # what follows would not go out either
        self._try(lambda: self._tracker.close() if self._tracker else None)

    def _next(self) -> Figures | None:
        """Wait for figures; None when there are none and will be none."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing.is_set())
            return self._queue.popleft() if self._queue else None

    def _deliver(self, figures: Figures) -> bool:
        """Try until the tracker has taken the figures, with pauses that grow; return whether it has."""
        pause, given_up_at = BACKOFF_SECONDS, time.monotonic() + GIVEN_UP_SECONDS
        while not self._try(lambda: self._write(figures)):
            if time.monotonic() > given_up_at or self._closing.wait(pause):
                return False
            pause = min(2 * pause, MAX_BACKOFF_SECONDS)
        return True

    def _write(self, figures: Figures) -> None:
        if self._tracker is None:
            self._tracker = self._open(self._memory)
        if self._tracker.remembers and self._memory.has(figures.series, figures.step):
            return
        self._tracker.write(figures)
        self._memory.advance(figures.series, figures.step)

    def _try(self, action: Callable[[], None]) -> bool:
        try:
            action()
        except Exception as error:  # Somebody else's library over somebody else's network: this is the border to it.
            self._fail("tracker.failed", error=f"{type(error).__name__}: {error}")
            return False
        return True

    def _fail(self, event: str, *, error: str) -> None:
        self._failed(self.name)
        log.warning(event, tracker=self.name, error=error)


def open_feeds(config: RunConfig, *, failed: Callable[[str], None]) -> list[TrackerFeed]:
    """Begin to feed every tracker of `telemetry.trackers`.

    Raises:
        ConfigError: There is none of such a name, or what it needs is not installed.
    """
    return [_open_feed(name, config, failed=failed) for name in config.telemetry.trackers]


def _open_feed(name: str, config: RunConfig, *, failed: Callable[[str], None]) -> TrackerFeed:
    plugin = find_plugin(TRACKERS, name, what=f"telemetry.trackers: {name!r}")
    try:
        kind: type[Tracker] = plugin.load()
    except ImportError as error:
        raise ConfigError(f"telemetry.trackers: {name!r} needs {error.name}; pip install 'relax-events[trackers]', or leave it out") from None
    memory = Memory(config.run_directory / "trackers" / f"{name.rpartition(':')[2]}.json")
    return TrackerFeed(name, lambda memory: kind(config, memory), memory=memory, failed=failed)
