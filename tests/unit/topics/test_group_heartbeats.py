"""How often the members of a consumer group send heartbeats."""

from __future__ import annotations

from relax_events.ops.topic_apply import compute_heartbeat_ms


def test_members_of_a_small_group_send_two_heartbeats_a_second() -> None:
    assert [compute_heartbeat_ms(number, session_ms=6000) for number in (0, 2, 50)] == [500] * 3


def test_members_of_a_large_group_send_them_at_least_four_times_a_session() -> None:
    assert compute_heartbeat_ms(100, session_ms=6000) == 1000
    assert compute_heartbeat_ms(1000, session_ms=6000) == 1500
    assert compute_heartbeat_ms(1000, session_ms=45_000) == 5000


def test_shortest_session_keeps_the_shortest_interval() -> None:
    assert compute_heartbeat_ms(1000, session_ms=1000) == 500
