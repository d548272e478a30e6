"""When a consumer that receives no records must check its group membership."""

from __future__ import annotations

import pytest

from relax_events.kafka.connection import Connection
from relax_events.kafka.workarounds.lost_assignments import MembershipMonitor, compute_check_seconds

TOPIC_PARTITION = ("rollout.samples", 3)


def observe(*unread: dict[tuple[str, int], int]) -> list[bool]:
    watch = MembershipMonitor(Connection("127.0.0.1:1"), "group")
    return [watch.check_unread(found) for found in unread]


def test_unread_partition_is_reported_after_a_delay_and_then_at_doubling_intervals() -> None:
    suspicious = observe(*[{TOPIC_PARTITION: 7}] * 18)
    assert [index for index, found in enumerate(suspicious) if found] == [2, 4, 8, 16]


def test_client_making_progress_is_not_reported() -> None:
    assert not any(observe(*({TOPIC_PARTITION: offset} for offset in range(12))))
    assert not any(observe(*[{}] * 12))
    assert observe(
        {TOPIC_PARTITION: 7},
        {TOPIC_PARTITION: 7},
        {},
        {TOPIC_PARTITION: 7},
        {TOPIC_PARTITION: 7},
        {TOPIC_PARTITION: 7},
    ) == [
        False,
        False,
        False,
        False,
        False,
        True,
    ]


def test_members_of_a_large_group_together_read_no_more_than_in_proportion_to_it() -> None:
    read = {size: size * size / compute_check_seconds(size) for size in (8, 32, 320, 3200)}
    assert read[320] / read[32] == pytest.approx(10)
    assert read[3200] / read[320] == pytest.approx(10)
    assert compute_check_seconds(8) == compute_check_seconds(0) == 6.0
