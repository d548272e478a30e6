"""Staleness as an offset policy: admission, window and skipping are pure functions over versions
and offsets.
"""

from relax_events.staleness.admission import (
    SLOTS_PER_PROMPT,
    BatchSlot,
    BatchSupply,
    IssuedGroup,
    OrderedSupply,
    ReadySupply,
    admitted_steps,
    build_group_end,
    count_missing,
    describe_left,
    is_external,
    was_left,
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
    "SLOTS_PER_PROMPT",
    "BatchSlot",
    "BatchSupply",
    "IssuedGroup",
    "OrderedSupply",
    "ReadyGroup",
    "ReadyGroups",
    "ReadySupply",
    "admitted_steps",
    "build_group_end",
    "choose_submissions",
    "compute_staleness",
    "count_missing",
    "count_spare_leases",
    "describe_left",
    "find_skip_targets",
    "is_expired",
    "is_external",
    "may_load",
    "may_submit",
    "reference_version",
    "was_left",
    "window",
]
