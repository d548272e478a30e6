"""Staleness as an offset policy: admission, window and skipping are pure functions over versions
and offsets.
"""

from relax_events.staleness.admission import (
    BatchSlot,
    IssuedGroup,
    admitted_steps,
    build_group_end,
    build_reissue,
    find_unissued_slots,
    is_external,
)
from relax_events.staleness.updating import (
    choose_submissions,
    count_spare_leases,
    may_load,
    may_submit,
)
from relax_events.staleness.window import (
    ReadyGroup,
    ReadyGroups,
    compute_staleness,
    find_skip_targets,
    is_expired,
    reference_version,
    window,
)

__all__ = [
    "BatchSlot",
    "IssuedGroup",
    "ReadyGroup",
    "ReadyGroups",
    "admitted_steps",
    "build_group_end",
    "build_reissue",
    "choose_submissions",
    "compute_staleness",
    "count_spare_leases",
    "find_skip_targets",
    "find_unissued_slots",
    "is_expired",
    "is_external",
    "may_load",
    "may_submit",
    "reference_version",
    "window",
]
