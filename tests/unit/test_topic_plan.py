"""The topic plan, and its difference to what a broker has."""

from __future__ import annotations

from collections.abc import Callable

from relax_events.broker.admin import TopicState
from relax_events.config import RunConfig
from relax_events.control.topics import plan_changes
from relax_events.topics import TopicPlan, TopicSpec


def test_plan_gives_all_sample_topics_the_same_partitions(make_run_config: Callable[..., RunConfig]) -> None:
    plan = TopicPlan.of(make_run_config(run={"id": "mine", "max_staleness": 2}, broker={"shards": 3}))
    specs = {spec.name: spec for spec in plan.specs()}
    assert len(specs) == len(plan.specs())
    assert {specs[topic].num_partitions for topic in plan.sample_topics()} == {12}
    assert all(spec.num_partitions == 1 for name, spec in specs.items() if ".control." in name or name.endswith(".dead-letters"))
    assert plan.topic("rollout.samples") == "relax.mine.rollout.samples"
    assert (plan.consumer_group("reward"), plan.transactional_id("trainer")) == ("relax.mine.reward", "relax.mine.trainer.0")
    assert list(plan.partitions_of_version(5)) == [3, 4, 5]
    assert plan.partition("000000-0000-0", 5) in plan.partitions_of_version(5)
    assert all(spec.doc for spec in specs.values())


def test_changes_are_the_difference_between_plan_and_broker() -> None:
    spec = TopicSpec("t", 4, 1, "of a test", {"retention.ms": "-1", "cleanup.policy": "delete"})
    same = TopicState("t", 4, 1, {"retention.ms": "-1", "cleanup.policy": "delete", "segment.bytes": "7"})
    assert plan_changes([spec], {"t": same}) == []
    assert [change.kind for change in plan_changes([spec], {})] == ["create"]
    other = TopicState("t", 2, 1, {"retention.ms": "5", "cleanup.policy": "delete"})
    assert [(change.kind, change.detail) for change in plan_changes([spec], {"t": other})] == [
        ("conflict", "has 2 partitions, the plan says 4"),
        ("alter", "retention.ms: 5 -> -1"),
    ]
