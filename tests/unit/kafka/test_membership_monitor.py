"""When a consumer that receives no records must check its group membership."""

from __future__ import annotations

from relax_events.kafka.connection import Connection
from relax_events.kafka.protocol.group_membership import MembershipMonitor

PLACE = ("rollout.samples", 3)


def looks(*unread: dict[tuple[str, int], int]) -> list[bool]:
    watch = MembershipMonitor(Connection("127.0.0.1:1"), "group")
    return [watch.check_unread(found) for found in unread]


def test_unread_partition_is_reported_after_a_delay_and_then_at_doubling_intervals() -> None:
    suspicious = looks(*[{PLACE: 7}] * 18)
    assert [index for index, found in enumerate(suspicious) if found] == [2, 4, 8, 16]


def test_client_making_progress_is_not_reported() -> None:
    assert not any(looks(*({PLACE: offset} for offset in range(12))))
    assert not any(looks(*[{}] * 12))
    assert looks({PLACE: 7}, {PLACE: 7}, {}, {PLACE: 7}, {PLACE: 7}, {PLACE: 7}) == [
        False,
        False,
        False,
        False,
        False,
        True,
    ]
