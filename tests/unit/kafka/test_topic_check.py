"""Findings of the topic and group check, each with a remedy where an operator has to act."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from relax_events.config import RunConfig
from relax_events.kafka.admin import PartitionState, TopicState
from relax_events.kafka.offset_admin import ConsumerGroupMember, ConsumerGroupState
from relax_events.ops.topic_check import group_findings, partition_findings

TOPICS = {"t": TopicState("t", 1, 3, {"min.insync.replicas": "2"})}


@pytest.mark.parametrize(
    ("leader", "in_sync", "text"),
    [
        (-1, (), "t[0] is offline: none of the brokers [1, 2, 3] leads it"),
        (1, (1,), "t[0] can't be written: 1 in sync, min.insync.replicas is 2"),
        (1, (1, 3), "t[0] is under-replicated: not in sync are the brokers [2]"),
    ],
)
def test_unhealthy_partition_is_reported(leader: int, in_sync: tuple[int, ...], text: str) -> None:
    (finding,) = partition_findings([PartitionState("t", 0, leader, (1, 2, 3), in_sync)], TOPICS)
    assert (finding.text, finding.is_good) == (text, False)


def test_healthy_partition_is_counted() -> None:
    (finding,) = partition_findings([PartitionState("t", 0, 1, (1, 2, 3), (1, 2, 3))], TOPICS)
    assert (finding.text, finding.is_good) == (
        "all 1 partitions have their leader and all replicas in sync",
        True,
    )


def test_role_without_members_is_reported_only_during_the_run(
    make_run_config: Callable[..., RunConfig],
) -> None:
    config = make_run_config(run={"id": "r"}, broker={"prompt_queue": "consumer_group"})
    someone = (ConsumerGroupMember("reward-0", "host", ()),)
    groups = {
        f"relax.r.{role}": ConsumerGroupState(f"relax.r.{role}", "stable", members)
        for role, members in (("reward", someone), ("advantage", ()))
    }
    found = [
        (finding.text, finding.is_good) for finding in group_findings(config, groups, is_over=False)
    ]
    assert found == [
        ("relax.r.advantage has no members", False),
        ("relax.r.rollout has no members", False),
    ]
    assert [finding.is_good for finding in group_findings(config, groups, is_over=True)] == [True]
