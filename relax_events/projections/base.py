"""The protocol of the control log's projections, and the one feeder that applies events to them.

    control log ──events──▶ apply_events, ProjectionGroup ──apply──▶ RunState, HealthState, ...

A projection never reads the log itself, has no clock but the one it was given, and does no I/O. So
state is rebuilt after a crash by reading the log again. `Ledger` also needs each record's position;
its reader is `history.ledger`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from relax_events.events.parts import Command
from relax_events.events.types import Event, RunCommanded

STOPPED_BY = "stopped_by"
"""Argument of a `stop` that a person asked for: the command by which."""


@dataclass(slots=True)
class RunPhase:
    """Whether the whole run is paused or over, by the newest command to it. `resumed_at` is when it
    was last resumed, in microseconds since the epoch, 0 before.
    """

    ended: RunCommanded | None = None
    is_paused: bool = False
    resumed_at: int = 0

    @property
    def is_over(self) -> bool:
        """Whether the run was stopped, and not resumed since."""
        return self.ended is not None

    def apply_command(self, event: RunCommanded) -> bool:
        """Apply a command; return whether it resumes the run. Commands to a role have no effect."""
        if event.role is not None:
            return False
        if event.command is Command.STOP:
            self.ended = event
        elif event.command is Command.PAUSE:
            self.is_paused = True
        elif event.command is Command.RESUME:
            self.ended, self.is_paused, self.resumed_at = None, False, event.commanded_at
        return event.command is Command.RESUME


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
