"""Brings the broker's topics and groups to the plan: shows the difference first, and refuses
changes that would lose or misplace records.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from relax_events.config import RunConfig
from relax_events.errors import BrokerRefused
from relax_events.kafka.admin import Admin, TopicState
from relax_events.topics import TopicPlan, TopicSpec
from relax_events.topics.names import CONSUMER_GROUP_ROLES, PROMPT_GROUPS

FOREVER = -1
HEARTBEAT_MS, HEARTBEAT_MS_PER_MEMBER, MAX_HEARTBEAT_MS = 500, 10, 5000
DELIVERY_LIMIT = 10
"""Deliveries after which the broker silently drops a prompt group: the maximum that brokers allow,
so that a worker fails the prompt group before."""
DANGERS = {
    "partitions": (
        "more partitions: existing records stay in partitions where no reader expects them any more"
    ),
    "retention": "shorter retention: the broker deletes records beyond the limit of time or size",
    "cleanup": "another clean-up policy: the broker deletes records that it has kept so far",
    "record-size": "smaller records: records of a size that was accepted so far are refused",
    "durability": "fewer replicas must be written before a record is acknowledged",
    "delete": "topics that are not in the plan are deleted with their records",
}
RESCORING_PREFIX = "reward.scores."
"""Prefix of rescoring topics: they belong to the run though no run file plans them, and are deleted
with it."""


@dataclass(frozen=True, slots=True)
class Change:
    """One difference between plan and broker.

    `kind` is create, alter, delete, extra (not in the plan, left alone: no drift) or conflict
    (can't be applied, or not without consent to its danger). `danger` is a name of `DANGERS`, or
    empty.
    """

    kind: str
    topic: str
    detail: str
    spec: TopicSpec | None
    danger: str = ""

    @property
    def is_drift(self) -> bool:
        """Whether the broker differs from the plan in something that the plan specifies."""
        return self.kind != "extra"


def plan_changes(
    specs: list[TopicSpec], topic_states: dict[str, TopicState], *, allow: Collection[str] = ()
) -> list[Change]:
    """Return the changes that bring the broker to the plan; none when it has all planned topics.

    Args:
        specs: The plan.
        topic_states: The existing topics with the run's prefix.
        allow: Dangers with consent. `delete` makes the topics deletable that are not in the plan.
    """
    changes = []
    for spec in specs:
        state = topic_states.get(spec.name)
        if state is None:
            changes.append(
                Change(
                    "create",
                    spec.name,
                    f"{spec.num_partitions} partitions x {spec.replication_factor}",
                    spec,
                )
            )
        else:
            changes += [*_shape_changes(spec, state), *_setting_changes(spec, state)]
    return changes + _extra_topics(topic_states.keys() - {spec.name for spec in specs}, allow)


def _shape_changes(spec: TopicSpec, state: TopicState) -> list[Change]:
    changes = []
    if state.num_partitions != spec.num_partitions:
        grows = "partitions" if state.num_partitions < spec.num_partitions else ""
        changes.append(
            Change(
                "conflict",
                spec.name,
                f"has {state.num_partitions} partitions, the plan says {spec.num_partitions}",
                spec,
                grows,
            )
        )
    if state.replication_factor > spec.replication_factor:
        changes.append(
            Change(
                "conflict",
                spec.name,
                f"has {state.replication_factor} replicas, the plan says {spec.replication_factor}",
                spec,
            )
        )
    return changes


def _setting_changes(spec: TopicSpec, state: TopicState) -> list[Change]:
    return [
        Change(
            "alter",
            spec.name,
            f"{key}: {state.settings.get(key)} -> {value}",
            spec,
            find_danger(key, state.settings.get(key), value),
        )
        for key, value in spec.settings.items()
        if state.settings.get(key) != value
    ]


def _extra_topics(names: Iterable[str], allow: Collection[str]) -> list[Change]:
    changes = []
    for name in sorted(names):
        is_ours = TopicPlan.parse_entity(name).startswith(RESCORING_PREFIX)
        goes = "delete" in allow and not is_ours
        detail = "not in the plan" + (", created by rescoring" if is_ours else "")
        changes.append(
            Change("delete" if goes else "extra", name, detail, None, "delete" if goes else "")
        )
    return changes


def find_danger(key: str, old: str | None, new: str) -> str:
    """Return the danger of a new value of a topic's setting; empty when there is none."""
    if old is None:
        return ""
    if key in ("retention.ms", "retention.bytes"):
        return (
            "retention"
            if int(new) != FOREVER and (int(old) == FOREVER or int(new) < int(old))
            else ""
        )
    if key == "cleanup.policy":
        return "cleanup" if set(new.split(",")) - set(old.split(",")) else ""
    lowered = {"max.message.bytes": "record-size", "min.insync.replicas": "durability"}
    return lowered[key] if key in lowered and int(new) < int(old) else ""


def count_records_at_risk(
    changes: Iterable[Change], admin: Admin, topic_states: Mapping[str, TopicState]
) -> dict[str, int]:
    """Return the number of records of topics with a dangerous change: the maximum that would be
    lost or misplaced.
    """
    topics = {change.topic for change in changes if change.danger}
    topic_partitions = [
        (topic, partition)
        for topic in sorted(topics)
        for partition in range(topic_states[topic].num_partitions)
    ]
    begins, ends = admin.beginning_offsets(topic_partitions), admin.end_offsets(topic_partitions)
    at_stake: dict[str, int] = {}
    for topic_partition in topic_partitions:
        at_stake[topic_partition[0]] = (
            at_stake.get(topic_partition[0], 0) + ends[topic_partition] - begins[topic_partition]
        )
    return at_stake


def apply_topics(config: RunConfig, admin: Admin, *, allow: Collection[str] = ()) -> list[Change]:
    """Create and alter topics and groups of a run; return the changes.

    Args:
        config: The run.
        admin: Of its broker.
        allow: Names of `DANGERS` with consent.
    Raises:
        BrokerRefused: A topic has another number of partitions than the plan, on which the
            partition of every sample depends, or a change is dangerous and without consent. Nothing
            was changed.
    """
    plan = TopicPlan.from_config(config)
    changes = [
        change
        for change in plan_changes(plan.specs(), admin.topics(plan.topic("")), allow=allow)
        if change.is_drift
    ]
    require_allowed(changes, allow=allow)
    admin.create([change.spec for change in changes if change.kind == "create" and change.spec])
    for change in changes:
        if change.kind == "conflict" and change.spec:
            admin.add_partitions(change.topic, change.spec.num_partitions)
    for spec in {
        change.topic: change.spec for change in changes if change.kind == "alter" and change.spec
    }.values():
        admin.alter_topic(spec.name, spec.settings)
    admin.delete([change.topic for change in changes if change.kind == "delete"])
    apply_groups(config, plan, admin)
    return changes


def require_allowed(changes: Iterable[Change], *, allow: Collection[str]) -> None:
    """Refuse impossible changes, and dangerous ones without consent.

    Raises:
        BrokerRefused: The text names the topic, the danger and the remedy.
    """
    for change in changes:
        if change.kind == "conflict" and change.danger not in allow:
            grow = (
                "; where no record lies yet, --allow partitions makes more" if change.danger else ""
            )
            raise BrokerRefused(
                f"topic {change.topic} {change.detail}; keep {_keys_behind(change)}, or take "
                f"another run.id{grow}"
            )
        if change.danger and change.danger not in allow:
            raise BrokerRefused(
                f"topic {change.topic}: {change.detail} is {DANGERS[change.danger]}; agree "
                f"with --allow {change.danger}"
            )


def _keys_behind(change: Change) -> str:
    """Name the keys of the run file that determine a topic's shape."""
    if "replicas" in change.detail:
        return "broker.replication_factor as it was"
    is_queue = TopicPlan.parse_entity(change.topic) == PROMPT_GROUPS
    return (
        "broker.queue_partitions as it was"
        if is_queue
        else "run.max_staleness and broker.partitions_per_version as they were"
    )


def compute_heartbeat_ms(num_members: int, *, session_ms: int) -> int:
    """Return the interval at which a group's members send heartbeats to the brokers: half a second,
    more in a group of more than 50, up to a quarter of the session and 5 s. So a large group at
    rest asks for little.
    """
    longest = max(min(session_ms // 4, MAX_HEARTBEAT_MS), HEARTBEAT_MS)
    return min(max(HEARTBEAT_MS, num_members * HEARTBEAT_MS_PER_MEMBER), longest)


def apply_groups(config: RunConfig, plan: TopicPlan, admin: Admin) -> None:
    """Set how fast a dead member is detected, and how long a lease lasts."""
    session_ms = int(config.broker.session_timeout_seconds * 1000)
    share = {
        "share.auto.offset.reset": "earliest",
        "share.isolation.level": "read_committed",
        "share.record.lock.duration.ms": str(int(config.broker.lease_seconds * 1000)),
        "share.delivery.count.limit": str(DELIVERY_LIMIT),
    }
    if config.is_replay:
        # its trainer commits no offsets on its source's topics, and no other role reads samples
        return
    queue_is_shared = config.broker.prompt_queue == "share_group"
    for role in CONSUMER_GROUP_ROLES if queue_is_shared else (*CONSUMER_GROUP_ROLES, "rollout"):
        interval_ms = compute_heartbeat_ms(config.roles().get(role, 0), session_ms=session_ms)
        timings = {
            "consumer.session.timeout.ms": str(session_ms),
            "consumer.heartbeat.interval.ms": str(interval_ms),
        }
        admin.alter_group(plan.consumer_group(role), timings)
    if queue_is_shared:
        admin.alter_group(plan.consumer_group("rollout"), share)
