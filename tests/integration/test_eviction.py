"""A restarted worker gets its partitions at once, before its predecessor's session expires."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from broker_steps import MEMBER, next_line, other_process, turn_until

from relax_events.kafka.admin import Admin
from relax_events.kafka.connection import Connection
from relax_events.kafka.consumer import SubscribedConsumer
from relax_events.kafka.workarounds.dead_members import evict_predecessors

LONG_SESSION = {"consumer.session.timeout.ms": "45000", "consumer.heartbeat.interval.ms": "500"}


def test_restart_of_a_killed_worker_releases_its_old_partitions(
    admin: Admin,
    connection: Connection,
    bootstrap_servers: str,
    make_topic: Callable[..., str],
    run_id: str,
) -> None:
    topic, group = make_topic("samples", 4), f"{run_id}.reward"
    admin.alter_group(group, LONG_SESSION)
    with other_process(MEMBER, bootstrap_servers, f"{run_id}.reward-0", group, topic) as process:
        assert next_line(process) == "assigned"
        other_member = replace(connection, client_id=f"{run_id}.reward-1")
        assert evict_predecessors(other_member, group) == 0, "the member bears another name"
        process.kill()
        process.wait(10)
        again = replace(connection, client_id=f"{run_id}.reward-0")
        assert [member.client_id for member in admin.groups(group)[group].members] == [
            f"{run_id}.reward-0"
        ], "the broker takes it for alive"
        assert evict_predecessors(again, group) == 1
        consumer = SubscribedConsumer(again, consumer_group=group, topics=[topic])
        turn_until(
            lambda: len(consumer.positions) == 4, lambda: consumer.fetch(timeout_seconds=0.2)
        )
        assert evict_predecessors(other_member, group) == 0
        consumer.close()


def test_evicting_from_a_missing_group_evicts_no_member(
    connection: Connection, run_id: str
) -> None:
    assert evict_predecessors(connection, f"{run_id}.reward") == 0
