"""The topic plan, and its difference to a broker's topics."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from relax_events.config import RunConfig
from relax_events.errors import BrokerRefused
from relax_events.kafka.admin import TopicState
from relax_events.ops.topic_apply import find_danger, plan_changes, require_allowed
from relax_events.topics import TopicPlan, TopicSpec
from relax_events.topics.names import QUEUE_TOPICS, SAMPLE_TOPICS


def test_plan_gives_all_sample_topics_the_same_partitions(
    make_run_config: Callable[..., RunConfig],
) -> None:
    plan = TopicPlan.from_config(
        make_run_config(
            run={"id": "mine", "max_staleness": 2}, broker={"partitions_per_version": 3}
        )
    )
    specs = {spec.name: spec for spec in plan.specs()}
    assert len(specs) == len(plan.specs())
    assert {specs[topic].num_partitions for topic in plan.sample_topics()} == {12}
    assert all(
        spec.num_partitions == 1
        for name, spec in specs.items()
        if ".control." in name or name.endswith(".dead-letters")
    )
    assert plan.topic("rollout.samples") == "relax.mine.rollout.samples"
    assert (plan.consumer_group("reward"), plan.transactional_id("trainer")) == (
        "relax.mine.reward",
        "relax.mine.trainer.0",
    )
    assert list(plan.partitions_of_version(5)) == [3, 4, 5]
    assert plan.partition("000000-0000-0", 5) in plan.partitions_of_version(5)
    assert all(spec.doc for spec in specs.values())


@pytest.mark.parametrize(("retained", "expected"), [(0, None), (20, "300000")])
def test_segments_are_rolled_by_time_on_topics_that_are_purged(
    make_run_config: Callable[..., RunConfig], retained: int, expected: str | None
) -> None:
    plan = TopicPlan.from_config(make_run_config(run={"id": "mine", "retain_versions": retained}))
    purged = [
        spec
        for spec in plan.specs()
        if plan.parse_entity(spec.name) in {*QUEUE_TOPICS, *SAMPLE_TOPICS}
    ]
    assert {spec.settings.get("segment.ms") for spec in purged} == {expected}


def test_compacted_and_time_limited_topics_use_small_segments(
    make_run_config: Callable[..., RunConfig],
) -> None:
    plan = TopicPlan.from_config(make_run_config(run={"id": "mine"}))
    specs = {plan.parse_entity(spec.name): spec for spec in plan.specs()}
    for entity in ("control.heartbeats.trainer", "control.broadcast-membership"):
        assert specs[entity].settings["cleanup.policy"] == "compact"
        assert int(specs[entity].settings["segment.bytes"]) <= 1 << 20
    reports = specs["control.metrics.trainer"].settings
    assert (int(reports["retention.ms"]), int(reports["retention.bytes"])) == (
        7 * 86_400_000,
        256 << 20,
    )
    assert int(reports["segment.bytes"]) < int(reports["retention.bytes"])
    for entity in ("control.train-steps", "control.schemas"):
        assert (
            specs[entity].settings["retention.ms"],
            specs[entity].settings["cleanup.policy"],
        ) == ("-1", "delete")


def test_heartbeat_and_metrics_topics_exist_for_each_role_of_the_run() -> None:
    names = {"prompter", "rollout", "reward", "advantage", "trainer", "controller", "metrics"}
    plan = TopicPlan.from_config(
        RunConfig.model_validate(
            {"run": {"id": "mine"}, "model": {"path": "m"}, "data": {"source": "jsonl:x"}}
        )
    )
    specs = {plan.parse_entity(spec.name) for spec in plan.specs()}
    for kind in ("heartbeats", "metrics"):
        assert {entity for entity in specs if entity.startswith(f"control.{kind}.")} == {
            f"control.{kind}.{role}" for role in names
        }
    assert (
        plan.has("control.metrics.reward"),
        plan.has("control.metrics.teacher"),
        plan.has("control.commands"),
    ) == (True, False, True)


def test_changes_are_the_difference_between_plan_and_broker() -> None:
    spec = TopicSpec("t", 4, 1, "of a test", {"retention.ms": "-1", "cleanup.policy": "delete"})
    same = TopicState(
        "t", 4, 1, {"retention.ms": "-1", "cleanup.policy": "delete", "segment.bytes": "7"}
    )
    assert plan_changes([spec], {"t": same}) == []
    assert [change.kind for change in plan_changes([spec], {})] == ["create"]
    other = TopicState("t", 2, 1, {"retention.ms": "5", "cleanup.policy": "delete"})
    assert [(change.kind, change.detail) for change in plan_changes([spec], {"t": other})] == [
        ("conflict", "has 2 partitions, the plan says 4"),
        ("alter", "retention.ms: 5 -> -1"),
    ]


def test_extra_topics_are_not_drift_and_are_deleted_only_when_allowed() -> None:
    found = {
        name: TopicState(name, 1, 1, {})
        for name in ("relax.r.strange", "relax.r.reward.scores.other")
    }
    kept = plan_changes([], found)
    assert [(change.kind, change.topic, change.is_drift) for change in kept] == [
        ("extra", "relax.r.reward.scores.other", False),
        ("extra", "relax.r.strange", False),
    ]
    agreed = plan_changes([], found, allow=["delete"])
    assert [(change.kind, change.topic, change.danger) for change in agreed] == [
        ("extra", "relax.r.reward.scores.other", ""),
        ("delete", "relax.r.strange", "delete"),
    ]


@pytest.mark.parametrize(
    ("key", "old", "new", "danger"),
    [
        ("retention.ms", "-1", "60000", "retention"),
        ("retention.ms", "60000", "1000", "retention"),
        ("retention.ms", "60000", "-1", ""),
        ("retention.bytes", "-1", "10", "retention"),
        ("cleanup.policy", "delete", "compact", "cleanup"),
        ("cleanup.policy", "compact,delete", "delete", ""),
        ("max.message.bytes", "20", "10", "record-size"),
        ("max.message.bytes", "10", "20", ""),
        ("min.insync.replicas", "2", "1", "durability"),
        ("compression.type", "zstd", "lz4", ""),
        ("retention.ms", None, "10", ""),
    ],
)
def test_topic_setting_changes_that_weaken_retention_or_durability_are_flagged(
    key: str, old: str | None, new: str, danger: str
) -> None:
    assert find_danger(key, old, new) == danger


def test_partition_and_replica_changes_are_rejected_naming_their_config_keys() -> None:
    spec = TopicSpec("relax.r.prompt.groups", 4, 1, "of a test", {})
    more = plan_changes([spec], {spec.name: TopicState(spec.name, 2, 1, {})})
    with pytest.raises(
        BrokerRefused,
        match=r"keep broker.queue_partitions as it was, or take another run.id; .*--allow partitions",
    ):
        require_allowed(more, allow=[])
    require_allowed(more, allow=["partitions"])
    fewer = plan_changes([spec], {spec.name: TopicState(spec.name, 9, 1, {})})
    with pytest.raises(BrokerRefused, match=r"has 9 partitions, the plan says 4"):
        require_allowed(fewer, allow=["partitions"])  # the broker can't take partitions away
    copies = plan_changes([spec], {spec.name: TopicState(spec.name, 4, 3, {})})
    with pytest.raises(
        BrokerRefused,
        match=r"has 3 replicas, the plan says 1; keep broker.replication_factor as it was",
    ):
        require_allowed(copies, allow=["partitions"])
