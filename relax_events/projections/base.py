"""The protocol of the control log's projections, and the one feeder that applies events to them.

    control log ──events──▶ apply_events, ProjectionGroup ──apply──▶ RunState, HealthState, ...

A projection never reads the log itself, has no clock but the one it was given, and does no I/O. So
state is rebuilt after a crash by reading the log again. `Ledger` also needs each record's position;
its reader is `history.ledger`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Protocol

from relax_events.events.types import Event


class Projection(Protocol):
    """State that is folded from events of the control log, in log order within each topic."""

    def apply(self, event: Event) -> object:
        """Apply one event. Events of other kinds have no effect."""


class ProjectionGroup:
    """Applies each event to several projections, under one lock, while a reader follows the log."""

    def __init__(self, *projections: Projection, lock: threading.Lock | None = None) -> None:
        """Begin with these projections.

        Args:
            projections: Receive each event, in this order.
            lock: Held while an event is applied; other threads hold it while they read the state.
        """
        self._projections = projections
        self.lock = threading.Lock() if lock is None else lock

    def apply(self, event: Event) -> None:
        """Apply one event to every projection."""
        with self.lock:
            for projection in self._projections:
                projection.apply(event)


def apply_events(events: Iterable[Event], *projections: Projection) -> None:
    """Apply all events, in order, to every projection: the feeder for a log that is read to its
    end.
    """
    for event in events:
        for projection in projections:
            projection.apply(event)
