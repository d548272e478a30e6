"""Consumer lag summed by slot and by member."""

from __future__ import annotations

from event_samples import published

from relax_events.kafka.offset_admin import ConsumerGroupMember, ConsumerGroupState
from relax_events.ops.consumer_lag import PartitionLag, find_slot_owners, sum_by_member, sum_by_slot

ROLLED = "relax.r.rollout.samples"


def row(
    partition: int,
    *,
    slot: int,
    version: int,
    behind: int,
    stale: int = 0,
    oldest_ms: int | None = None,
    role: str = "reward",
) -> PartitionLag:
    return PartitionLag(
        role=role,
        topic_partition=(ROLLED, partition),
        slot=slot,
        policy_version=version,
        position=0,
        num_records=behind,
        num_stale=stale,
        oldest_ms=oldest_ms,
    )


ROWS = [
    row(0, slot=0, version=6, behind=5, stale=2, oldest_ms=4000),
    row(1, slot=0, version=6, behind=3, oldest_ms=2000),
    row(2, slot=1, version=4, behind=0),
    row(0, slot=0, version=6, behind=1, oldest_ms=9000, role="advantage"),
]


def test_slot_belongs_to_its_newest_version() -> None:
    owners = find_slot_owners([published(version) for version in (0, 1, 2, 4, 3)], num_slots=3)
    assert {slot: event.policy_version for slot, event in owners.items()} == {0: 3, 1: 4, 2: 2}


def test_lag_by_slot_sums_partitions_and_takes_the_oldest_record() -> None:
    found = sum_by_slot(ROWS, now_ms=10_000)
    assert [
        (
            item.role,
            item.slot,
            item.policy_version,
            item.num_records,
            item.num_stale,
            item.age_seconds,
        )
        for item in found
    ] == [
        ("reward", 0, 6, 8, 2, 8.0),
        ("reward", 1, 4, 0, 0, None),
        ("advantage", 0, 6, 1, 0, 1.0),
    ]


def test_lag_by_member_names_idle_members_and_orphaned_partitions() -> None:
    members = (
        ConsumerGroupMember("reward-0", "host-a", ((ROLLED, 0),)),
        ConsumerGroupMember("reward-1", "host-b", ()),
    )
    found = sum_by_member(
        ROWS, {"reward": ConsumerGroupState("g", "stable", members)}, now_ms=10_000
    )
    assert [
        (item.role, item.member, item.host, item.num_records, item.partitions) for item in found
    ] == [
        ("advantage", "-", "-", 1, "rollout.samples[0]"),
        ("reward", "-", "-", 3, "rollout.samples[1,2]"),
        ("reward", "reward-0", "host-a", 5, "rollout.samples[0]"),
        ("reward", "reward-1", "host-b", 0, ""),
    ]
