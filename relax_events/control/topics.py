"""Brings the broker's topics and groups to the plan: shows the difference first, refuses what would lose or misplace records."""

from __future__ import annotations

from dataclasses import dataclass

from relax_events.broker.admin import Admin, TopicState
from relax_events.config import RunConfig
from relax_events.errors import BrokerRefused
from relax_events.topics import TopicPlan, TopicSpec

CONSUMER_ROLES = ("reward", "reference", "actor-forward", "advantage")


@dataclass(frozen=True, slots=True)
class Change:
    """One difference between plan and broker. `kind` is create, alter or conflict."""

    kind: str
    topic: str
    detail: str
    spec: TopicSpec


def plan_changes(specs: list[TopicSpec], found: dict[str, TopicState]) -> list[Change]:
    """Return what has to happen so that the broker has the planned topics; nothing when it has."""
    changes = []
    for spec in specs:
        state = found.get(spec.name)
        if state is None:
            changes.append(Change("create", spec.name, f"{spec.num_partitions} partitions x {spec.replication_factor}", spec))
            continue
        if state.num_partitions != spec.num_partitions:
            changes.append(Change("conflict", spec.name, f"has {state.num_partitions} partitions, the plan says {spec.num_partitions}", spec))
        changes += [
            Change("alter", spec.name, f"{key}: {state.settings.get(key)} -> {value}", spec)
            for key, value in spec.settings.items()
            if state.settings.get(key) != value
        ]
    return changes


def apply_topics(config: RunConfig, admin: Admin) -> list[Change]:
    """Create and alter topics and groups of a run; return what was changed.

    Raises:
        BrokerRefused: A topic has another number of partitions than the plan; since the partition of a sample follows
            from it, such a run can't be continued. Nothing was changed.
    """
    plan = TopicPlan.of(config)
    changes = plan_changes(plan.specs(), admin.topics(plan.topic("")))
    if conflicts := [change for change in changes if change.kind == "conflict"]:
        remedy = "keep run.max_staleness and broker.shards as they were, or take another run.id"
        raise BrokerRefused(f"topic {conflicts[0].topic} {conflicts[0].detail}; {remedy}")
    admin.create([change.spec for change in changes if change.kind == "create"])
    for spec in {change.topic: change.spec for change in changes if change.kind == "alter"}.values():
        admin.alter_topic(spec.name, spec.settings)
    apply_groups(config, plan, admin)
    return changes


def apply_groups(config: RunConfig, plan: TopicPlan, admin: Admin) -> None:
    """Set how fast a dead member is noticed, and how long a lease lasts."""
    timings = {
        "consumer.session.timeout.ms": str(int(config.broker.session_timeout_seconds * 1000)),
        "consumer.heartbeat.interval.ms": "500",
    }
    share = {
        "share.auto.offset.reset": "earliest",
        "share.isolation.level": "read_committed",
        "share.record.lock.duration.ms": str(int(config.broker.lease_seconds * 1000)),
    }
    for role in CONSUMER_ROLES:
        admin.alter_group(plan.consumer_group(role), timings)
    admin.alter_group(plan.consumer_group("rollout"), share if config.broker.lease == "share_group" else timings)


def consumer_lag(config: RunConfig, admin: Admin) -> dict[str, dict[int, int]]:
    """Return records behind, by role and slot, summed over the slot's topics and shards: the operator's gauge of staleness."""
    plan = TopicPlan.of(config)
    places = [(topic, partition) for topic in plan.sample_topics() for partition in range(plan.num_sample_partitions)]
    ends = admin.end_offsets(places)
    lag: dict[str, dict[int, int]] = {}
    for role in (*CONSUMER_ROLES, "trainer"):
        committed = admin.committed(plan.consumer_group(role), places)
        slots: dict[int, int] = {}
        for (topic, partition), offset in committed.items():
            if (topic, partition) in ends:
                slot = partition // plan.shards
                slots[slot] = slots.get(slot, 0) + max(ends[topic, partition] - offset, 0)
        if slots:
            lag[role] = slots
    return lag
