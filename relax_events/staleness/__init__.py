"""Staleness as an offset policy: admission, window and skip, as pure functions over versions and
offsets.
"""

from relax_events.staleness.admission import (
    IssuedGroup,
    BatchSlot,
    admitted_steps,
    find_unissued_slots,
    build_group_end,
    is_external,
    build_reissue,
)
from relax_events.staleness.selection import ReadyGroup, select_groups
from relax_events.staleness.window import is_expired, find_skip_targets, compute_staleness, window

__all__ = [
    "IssuedGroup",
    "BatchSlot",
    "ReadyGroup",
    "admitted_steps",
    "find_unissued_slots",
    "build_group_end",
    "is_expired",
    "is_external",
    "build_reissue",
    "select_groups",
    "find_skip_targets",
    "compute_staleness",
    "window",
]
