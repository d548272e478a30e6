"""How far consumer groups are behind: by slot and owning version, by member, and since when."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import structlog

from relax_events.config import RunConfig
from relax_events.errors import BrokerUnavailable
from relax_events.events.types import PolicyVersionPublished
from relax_events.history.run_log import RunLog
from relax_events.kafka.admin import Admin
from relax_events.kafka.inventory import Inventory
from relax_events.kafka.offset_admin import ConsumerGroupState
from relax_events.kafka.protocol.queue_lag import QueuePosition, read_queue_positions
from relax_events.ops.dependent_runs import find_dependent_runs
from relax_events.topics import TopicPlan, compute_slot
from relax_events.topics.names import CONSUMER_GROUP_ROLES, PROMPT_GROUPS
from relax_events.topics.partitions import TopicPartition
from relax_events.topics.plan import list_input_partitions, list_role_inputs

log_events = structlog.get_logger(__name__)
NO_MEMBER = "-"


def read_slot_lag(config: RunConfig, admin: Admin) -> dict[str, dict[int, int]]:
    """Return the lag in records by role and slot, summed over the slot's topics and shards: the
    operator's measure of staleness.
    """
    plan = TopicPlan.from_config(config)
    topic_partitions = [
        (topic, partition)
        for topic in plan.sample_topics()
        for partition in range(plan.num_sample_partitions)
    ]
    ends = admin.end_offsets(topic_partitions)
    lag: dict[str, dict[int, int]] = {}
    for role in (*CONSUMER_GROUP_ROLES, "trainer"):
        committed = admin.committed_offsets(plan.consumer_group(role), topic_partitions)
        slots: dict[int, int] = {}
        for (topic, partition), offset in committed.items():
            if (topic, partition) in ends:
                slot = partition // plan.partitions_per_version
                slots[slot] = slots.get(slot, 0) + max(ends[topic, partition] - offset, 0)
        if slots:
            lag[role] = slots
    return lag


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionLag:
    """How far a role is behind in one partition.

    `num_stale` of the `num_records` lie below the start of the version that owns the slot now, so
    they belong to an older one. `slot` and `policy_version` are None on the prompt queue, the
    latter also before the first publication.
    """

    role: str
    topic_partition: TopicPartition
    slot: int | None
    policy_version: int | None
    position: int
    num_records: int
    num_stale: int = 0
    oldest_ms: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LagRow:
    """Summed lag; `age_seconds` is the age of the oldest unread record, None when nothing is
    unread.
    """

    role: str
    slot: int | None = None
    policy_version: int | None = None
    member: str = ""
    host: str = ""
    partitions: str = ""
    num_records: int
    num_stale: int
    age_seconds: float | None


def find_slot_owners(
    published: Iterable[PolicyVersionPublished], *, num_slots: int
) -> dict[int, PolicyVersionPublished]:
    """Return the newest published version of each slot."""
    owners: dict[int, PolicyVersionPublished] = {}
    for event in published:
        slot = compute_slot(event.policy_version, num_slots=num_slots)
        if slot not in owners or owners[slot].policy_version < event.policy_version:
            owners[slot] = event
    return owners


def read_partition_lag(config: RunConfig, admin: Admin) -> list[PartitionLag]:
    """Return the lag of every role at every partition that it reads, with the age of its oldest
    unread record.

    A run that replays this one has a row for each partition too, `run ID`: its records count until
    its newest checkpoint lies behind them.
    """
    with RunLog(config, name="lag") as log:
        owners = find_slot_owners(
            (record.event for record in log.versions.values()), num_slots=log.plan.num_slots
        )
        inputs = {
            role: (log.plan.consumer_group(role), list_input_partitions(config, role))
            for role in list_role_inputs(config)
        }
        if not config.is_replay:
            followers = find_dependent_runs(log.plan, admin, Inventory(log.connection))
            inputs |= {
                f"run {follower.run_id}": (follower.group, list(follower.offsets))
                for follower in followers
            }
        rows = [
            row
            for role, (group, topic_partitions) in inputs.items()
            for row in _compute_lag(log.plan, admin, role, group, topic_partitions, owners)
        ]
        rows += _compute_share_group_lag(config, admin, log)
        oldest = _oldest_unread(log, rows)
    return [
        replace(row, oldest_ms=oldest.get((row.topic_partition, row.position)))
        if row.num_records
        else row
        for row in rows
    ]


def _compute_lag(
    plan: TopicPlan,
    admin: Admin,
    role: str,
    group: str,
    topic_partitions: list[TopicPartition],
    owners: Mapping[int, PolicyVersionPublished],
) -> list[PartitionLag]:
    committed = admin.committed_offsets(group, topic_partitions)
    begins, ends = admin.beginning_offsets(topic_partitions), admin.end_offsets(topic_partitions)
    queue = plan.topic(PROMPT_GROUPS)
    rows = []
    for topic_partition in topic_partitions:
        position = max(committed.get(topic_partition, 0), begins[topic_partition])
        slot = (
            None
            if topic_partition[0] == queue
            else topic_partition[1] // plan.partitions_per_version
        )
        owner = None if slot is None else owners.get(slot)
        behind = max(ends[topic_partition] - position, 0)
        starts = (
            {(plan.parse_entity(at.topic), at.partition): at.offset for at in owner.start_offsets}
            if owner
            else {}
        )
        start = min(
            starts.get((plan.parse_entity(topic_partition[0]), topic_partition[1]), 0),
            ends[topic_partition],
        )
        version = owner.policy_version if owner else None
        stale = max(start - position, 0)
        rows.append(
            PartitionLag(
                role=role,
                topic_partition=topic_partition,
                slot=slot,
                policy_version=version,
                position=position,
                num_records=behind,
                num_stale=stale,
            )
        )
    return rows


def _compute_share_group_lag(config: RunConfig, admin: Admin, log: RunLog) -> list[PartitionLag]:
    """Return the lag of the rollout workers' share group: what none of them has finished. A broker
    that does not answer this request (Kafka before 4.2) leaves no row, and a line in the log.
    """
    if config.is_replay or config.broker.prompt_queue != "share_group":
        return []
    try:
        positions = read_queue_positions(log.connection, log.plan.consumer_group("rollout"))
    except BrokerUnavailable as error:
        log_events.warning("queue_lag.unavailable", error=str(error))
        return []
    queue = log.plan.topic(PROMPT_GROUPS)
    topic_partitions = [(queue, partition) for partition in range(log.plan.queue_partitions)]
    begins, ends = admin.beginning_offsets(topic_partitions), admin.end_offsets(topic_partitions)
    rows = []
    for topic_partition in topic_partitions:
        begin = begins[topic_partition]
        waiting = QueuePosition(begin, ends[topic_partition] - begin)
        position = positions.get(topic_partition, waiting)
        rows.append(
            PartitionLag(
                role="rollout",
                topic_partition=topic_partition,
                slot=None,
                policy_version=None,
                position=max(position.start, begin),
                num_records=position.num_unfinished,
            )
        )
    return rows


def _oldest_unread(
    log: RunLog, rows: Iterable[PartitionLag]
) -> dict[tuple[TopicPartition, int], int]:
    """Return when the first unread record of each partition was written, in milliseconds since the
    epoch.

    Roles at different offsets of one partition are read one after the other, a record each.
    """
    timestamps: dict[tuple[TopicPartition, int], int] = {}
    unread = {(row.topic_partition, row.position) for row in rows if row.num_records}
    while unread:
        spans = {
            topic_partition: (position, position + 1)
            for topic_partition, position in sorted(unread)
        }
        for record in log.records(spans):
            timestamps[(record.topic, record.partition), record.offset] = record.timestamp_ms
        unread -= {(topic_partition, start) for topic_partition, (start, _) in spans.items()}
    return timestamps


def sum_by_slot(rows: Iterable[PartitionLag], *, now_ms: int) -> list[LagRow]:
    """Sum the lag by role and slot, in order of appearance."""
    groups: dict[tuple[str, int | None], list[PartitionLag]] = {}
    for row in rows:
        groups.setdefault((row.role, row.slot), []).append(row)
    return [
        _sum_rows(
            members, role=role, slot=slot, policy_version=members[0].policy_version, now_ms=now_ms
        )
        for (role, slot), members in groups.items()
    ]


def sum_by_member(
    rows: Iterable[PartitionLag], groups: Mapping[str, ConsumerGroupState], *, now_ms: int
) -> list[LagRow]:
    """Sum the lag by the group member that holds the partition; partitions without a member are
    listed under `-`.

    Args:
        rows: The lag of every partition.
        groups: The state of each role's group, by role.
        now_ms: Milliseconds since the epoch.
    """
    holders = {
        (role, topic_partition): member
        for role, group in groups.items()
        for member in group.members
        for topic_partition in member.partitions
    }
    held: dict[tuple[str, str, str], list[PartitionLag]] = {}
    for role, group in groups.items():
        held |= {(role, member.client_id, member.host): [] for member in group.members}
    for row in rows:
        member = holders.get((row.role, row.topic_partition))
        key = (
            (row.role, member.client_id, member.host)
            if member
            else (row.role, NO_MEMBER, NO_MEMBER)
        )
        held.setdefault(key, []).append(row)
    return [
        _sum_rows(
            members, role=role, member=name, host=host, partitions=_span(members), now_ms=now_ms
        )
        for (role, name, host), members in sorted(held.items())
    ]


def _sum_rows(
    rows: list[PartitionLag],
    *,
    role: str,
    now_ms: int,
    slot: int | None = None,
    policy_version: int | None = None,
    member: str = "",
    host: str = "",
    partitions: str = "",
) -> LagRow:
    oldest = min((row.oldest_ms for row in rows if row.oldest_ms is not None), default=None)
    return LagRow(
        role=role,
        slot=slot,
        policy_version=policy_version,
        member=member,
        host=host,
        partitions=partitions,
        num_records=sum(row.num_records for row in rows),
        num_stale=sum(row.num_stale for row in rows),
        age_seconds=None if oldest is None else max(now_ms - oldest, 0) / 1000,
    )


def _span(rows: Iterable[PartitionLag]) -> str:
    """Format the partitions of each topic: rollout.samples[0,2]."""
    topics: dict[str, list[int]] = {}
    for row in rows:
        topics.setdefault(TopicPlan.parse_entity(row.topic_partition[0]), []).append(
            row.topic_partition[1]
        )
    return " ".join(
        f"{entity}[{','.join(map(str, sorted(partitions)))}]"
        for entity, partitions in sorted(topics.items())
    )
