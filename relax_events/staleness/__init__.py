"""Staleness as an offset policy: admission, window and skip, as pure functions over versions and
offsets.
"""

from relax_events.staleness.admission import (
    IssuedGroup,
    Place,
    admitted_steps,
    due_places,
    end_of,
    is_guest,
    reissue_of,
)
from relax_events.staleness.selection import ReadyGroup, select_groups
from relax_events.staleness.window import is_expired, skip_targets, staleness_of, window

__all__ = [
    "IssuedGroup",
    "Place",
    "ReadyGroup",
    "admitted_steps",
    "due_places",
    "end_of",
    "is_expired",
    "is_guest",
    "reissue_of",
    "select_groups",
    "skip_targets",
    "staleness_of",
    "window",
]
