"""Partitions without a leader are counted apart from those with lagging replicas."""

from __future__ import annotations

from relax_events.kafka.admin import PartitionState
from relax_events.kafka.inventory import count_unhealthy_partitions


def partition(leader: int, replicas: tuple[int, ...], in_sync: tuple[int, ...]) -> PartitionState:
    return PartitionState("t", 0, leader, replicas, in_sync)


def test_unhealthy_partitions_are_counted_by_kind() -> None:
    whole, alone = partition(1, (1, 2, 3), (3, 1, 2)), partition(1, (1,), (1,))
    behind, gone = partition(2, (1, 2, 3), (2, 3)), partition(-1, (1, 2), (1,))
    assert count_unhealthy_partitions([whole, behind, behind, alone, gone]) == {
        "offline": 1,
        "under_replicated": 2,
    }
    assert count_unhealthy_partitions([]) == {"offline": 0, "under_replicated": 0}
