"""Sends heartbeats while the work loop is inside a long call. Between calls it stays silent, so that a loop that hangs is noticed."""

from __future__ import annotations

import threading
from typing import Self

import structlog

from relax_events.errors import BrokerError
from relax_events.pipeline.beats import Beats

log = structlog.get_logger()
JOIN_SECONDS = 5.0


class HeartbeatThread:
    """A thread of a worker. Use it as a context manager."""

    def __init__(self, beats: Beats, *, interval_seconds: float) -> None:
        self._beats, self._interval = beats, interval_seconds
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeats", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End the thread; a heartbeat that is being sent is sent."""
        self._closing.set()
        self._thread.join(JOIN_SECONDS)

    def _run(self) -> None:
        while not self._closing.wait(self._interval):
            try:
                self._beats.beat_inside_activity()
            except BrokerError as error:  # the work loop meets it too, and decides
                log.warning("heartbeat.unsent", error=str(error))
