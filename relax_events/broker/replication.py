"""How well the partitions of a run are replicated, as the cluster sees them."""

from __future__ import annotations

from collections.abc import Iterable

from relax_events.broker.admin import PartitionState

OFFLINE, UNDER_REPLICATED = "offline", "under_replicated"


def amiss(partitions: Iterable[PartitionState]) -> dict[str, int]:
    """Count partitions that nobody leads, which can't be read or written, and those with a leader whose replicas have not all caught up."""
    states = [OFFLINE if one.leader < 0 else UNDER_REPLICATED if len(one.in_sync) < len(one.replicas) else "" for one in partitions]
    return {state: states.count(state) for state in (OFFLINE, UNDER_REPLICATED)}
