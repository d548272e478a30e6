"""An idle member of a consumer group asks the broker whether it is still a member, and reports it
when it is not.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from broker_steps import turn_until

from relax_events.errors import ClientFailed
from relax_events.kafka.connection import Connection
from relax_events.kafka.consumer import SubscribedConsumer
from relax_events.kafka.protocol.group_membership import GroupMembership, list_members
from relax_events.kafka.workarounds import lost_assignments as membership

QUIET_SECONDS = 4.0


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let members check their membership often."""
    monkeypatch.setattr(membership, "CHECK_SECONDS", 1.0)


def joined(connection: Connection, name: str, group: str, topic: str) -> SubscribedConsumer:
    return SubscribedConsumer(
        replace(connection, client_id=name), consumer_group=group, topics=[topic]
    )


def test_list_members_returns_joined_members_with_their_partitions(
    connection: Connection, make_topic: Callable[..., str], make_group: Callable[[str], str]
) -> None:
    topic, group = make_topic("samples", 2), make_group("reward")
    consumers = [joined(connection, f"reward-{number}", group, topic) for number in range(3)]

    def fetch() -> None:
        for consumer in consumers:
            consumer.fetch(timeout_seconds=0.1)

    turn_until(
        lambda: sorted(len(consumer.positions) for consumer in consumers) == [0, 1, 1], fetch
    )
    deadline = time.monotonic() + QUIET_SECONDS
    while time.monotonic() < deadline:
        fetch()  # several checks of each, the idle one too: none fails
    held = {member.client_id: member.partitions for member in list_members(connection, group)}
    assert held == {
        f"reward-{number}": frozenset(consumer.positions)
        for number, consumer in enumerate(consumers)
    }
    for consumer in consumers:
        consumer.close()


def test_missing_group_has_no_members(connection: Connection, run_id: str) -> None:
    assert list_members(connection, f"{run_id}.reward") == []


@pytest.mark.parametrize(
    "known", [False, True], ids=["unknown to the broker", "given what it does not hold"]
)
def test_client_whose_assignment_differs_from_the_brokers_view_fails(
    connection: Connection,
    make_topic: Callable[..., str],
    make_group: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
    known: bool,
) -> None:
    topic, group = make_topic("samples", 2), make_group("reward")
    consumer = joined(connection, "reward-0", group, topic)
    turn_until(lambda: len(consumer.positions) == 2, lambda: consumer.fetch(timeout_seconds=0.1))
    (member,) = list_members(connection, group)
    other = GroupMembership(member.member_id, member.client_id, frozenset([(topic, 0)]))
    monkeypatch.setattr(membership, "list_members", lambda *_: [other] if known else [])
    with pytest.raises(
        ClientFailed,
        match="gave this client 1 partitions, which holds 2"
        if known
        else "does not know this client",
    ):
        turn_until(lambda: False, lambda: consumer.fetch(timeout_seconds=0.1))
    consumer.close()
