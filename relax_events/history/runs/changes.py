"""Who asked for changes of a run, as its log says."""

from __future__ import annotations

from relax_events.events.types import ChangeRequested
from relax_events.history.run_log import RunLog
from relax_events.session.change_audit import ENTITY


def read_changes(log: RunLog) -> list[ChangeRequested]:
    """Return the changes in log order; none for a run of a release that recorded none."""
    if log.plan.topic(ENTITY) not in log.topics:
        return []
    return [found.event for found in log.read_control(ENTITY, ChangeRequested)]
