"""Ends a worker: after a signal or a command it finishes its work within a deadline."""

from __future__ import annotations

import os
import queue
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

STDERR_FD = 2


class Drain:
    """Starts once. Then the worker takes no new work and finishes its current work, for at most
    `seconds`.

    The first SIGTERM or SIGINT starts the drain; a second one ends the process at once. This loses
    no records either: uncommitted records are delivered again.

    A signal is handled between two instructions of the main thread, so neither this object nor a
    listener may take a lock that the main thread takes, such as that of a `threading.Event`.
    """

    def __init__(self, *, seconds: float) -> None:
        self._seconds = seconds
        self._is_requested = False
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.signal: int | None = None
        """The signal that started it, if any."""
        self.exit_note = ""
        """Written to stderr when a second signal ends the process."""
        self._started = 0.0
        self._listeners: list[Callable[[], None]] = []

    def listen_to_signals(self) -> None:
        """Start the drain on SIGTERM and SIGINT."""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)

    def on_start(self, listener: Callable[[], None]) -> None:
        """Call `listener` when the drain starts, or at once if it has started; it wakes a waiting
        loop.
        """
        self._listeners.append(listener)
        if self.requested:
            listener()

    def start(self) -> None:
        """Start the drain."""
        if not self._is_requested:
            self._started = time.monotonic()
            self._is_requested = True
            self._wakes.put(None)
            for listener in self._listeners:
                listener()

    @property
    def requested(self) -> bool:
        """Whether the drain has started."""
        return self._is_requested

    @property
    def elapsed_ratio(self) -> float:
        """Share of the deadline that has passed; 0 before the start."""
        return (time.monotonic() - self._started) / self._seconds if self.requested else 0.0

    @property
    def deadline_passed(self) -> bool:
        """Whether the deadline has passed."""
        return self.elapsed_ratio > 1.0

    def wait(self, timeout_seconds: float) -> bool:
        """Wait for the start of the drain; return whether it has started."""
        with suppress(queue.Empty):
            self._wakes.put(self._wakes.get(timeout=timeout_seconds))  # which wakes the next waiter
        return self._is_requested

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self.signal is not None:
            if self.exit_note:  # unbuffered, since this may interrupt a write
                with suppress(OSError):
                    os.write(STDERR_FD, f"\n{self.exit_note}\n".encode())
            os._exit(128 + number)
        self.signal = number
        self.start()
