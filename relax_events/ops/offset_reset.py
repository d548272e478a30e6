"""Resets the committed offsets of a role: the next records that it reads, after it was drained."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from relax_events.config import RunConfig
from relax_events.errors import BrokerRefused, ConfigError
from relax_events.events.parts import TopicOffset
from relax_events.events.types import PolicyVersionPublished
from relax_events.history.run_log import RunLog
from relax_events.kafka.admin import Admin
from relax_events.topics import TopicPlan
from relax_events.topics.names import PROMPT_GROUPS
from relax_events.topics.partitions import TopicPartition
from relax_events.topics.plan import list_input_partitions, list_role_inputs

OFFSET_PATTERN = re.compile(r"(?P<topic>[a-z0-9.-]+)\[(?P<partition>[0-9]+)\]@(?P<offset>[0-9]+)")
DANGERS = {
    "trainer": (
        "the trainer continues from its checkpoint and its committed steps; its group's "
        "offsets only report its progress"
    ),
    "skip": (
        "records that the role has not read would be skipped: their prompt groups wait until "
        "they expire"
    ),
}


@dataclass(frozen=True, slots=True)
class ResetTarget:
    """The target of a reset; exactly one field is given."""

    version: int | None = None
    time_ms: int | None = None
    offsets: Sequence[str] = ()
    to_beginning: bool = False
    to_end: bool = False

    def __post_init__(self) -> None:
        options = [
            self.version is not None,
            self.time_ms is not None,
            bool(self.offsets),
            self.to_beginning,
            self.to_end,
        ]
        if sum(options) != 1:
            raise ConfigError(
                "a reset needs one of --to-version, --to-time, --to-offset, --to-beginning, "
                "--to-end"
            )


@dataclass(frozen=True, slots=True)
class OffsetMove:
    """One committed offset, before (None: never committed) and after. Negative `num_skipped` are
    read again.
    """

    topic_partition: TopicPartition
    before: int | None
    after: int
    num_skipped: int


@dataclass(frozen=True, slots=True)
class ResetPlan:
    """All changes of a reset."""

    role: str
    consumer_group: str
    moves: list[OffsetMove] = field(default_factory=list)

    @property
    def dangers(self) -> list[str]:
        """Names of its `DANGERS`."""
        skips = any(move.num_skipped > 0 for move in self.moves)
        return [
            name
            for name, present in (("trainer", self.role == "trainer"), ("skip", skips))
            if present
        ]


def plan_reset(config: RunConfig, admin: Admin, role: str, target: ResetTarget) -> ResetPlan:
    """Return the changes of a reset.

    Raises:
        ConfigError: The role commits no offsets, or the target names no partition of its topics.
    """
    inputs = list_role_inputs(config)
    if role not in inputs:
        if role == "rollout" and inputs:
            raise ConfigError(
                "role 'rollout' reads nothing by committed offsets: its share group keeps its "
                "state on the broker"
            )
        raise ConfigError(
            f"role {role!r} reads nothing by committed offsets: the roles of this run that do are "
            f"{', '.join(inputs) or 'none'}"
        )
    plan = TopicPlan.from_config(config)
    topic_partitions = list_input_partitions(config, role)
    begins, ends = admin.beginning_offsets(topic_partitions), admin.end_offsets(topic_partitions)
    committed = admin.committed_offsets(plan.consumer_group(role), topic_partitions)
    moves = []
    for topic_partition, offset in resolve_target(
        config, admin, topic_partitions, target, begins=begins, ends=ends
    ).items():
        after = min(max(offset, begins[topic_partition]), ends[topic_partition])
        position = max(committed.get(topic_partition, 0), begins[topic_partition])
        if committed.get(topic_partition) != after and (
            topic_partition in committed or after != begins[topic_partition]
        ):
            moves.append(
                OffsetMove(topic_partition, committed.get(topic_partition), after, after - position)
            )
    return ResetPlan(role, plan.consumer_group(role), moves)


def resolve_target(
    config: RunConfig,
    admin: Admin,
    topic_partitions: Collection[TopicPartition],
    target: ResetTarget,
    *,
    begins: Mapping[TopicPartition, int],
    ends: Mapping[TopicPartition, int],
) -> dict[TopicPartition, int]:
    """Return the target offset of each topic partition."""
    if target.version is not None:
        with RunLog(config, name="reset") as log:
            published = [record.event for record in log.versions.values()]
        return find_version_offsets(
            TopicPlan.from_config(config),
            published,
            topic_partitions,
            version=target.version,
            ends=ends,
        )
    if target.time_ms is not None:
        return admin.offsets_at(topic_partitions, timestamp_ms=target.time_ms)
    if target.offsets:
        return parse_offsets(TopicPlan.from_config(config), topic_partitions, target.offsets)
    return dict(begins if target.to_beginning else ends)


def find_version_offsets(
    plan: TopicPlan,
    published: Collection[PolicyVersionPublished],
    topic_partitions: Collection[TopicPartition],
    *,
    version: int,
    ends: Mapping[TopicPartition, int],
) -> dict[TopicPartition, int]:
    """Return the first offset of this version's and newer records in each partition.

    A slot that is not owned by this or a newer version holds older records only: its offset is the
    end.

    Raises:
        ConfigError: The version was never published, or the topics are not ordered by versions.
    """
    if version not in {event.policy_version for event in published}:
        newest = max((event.policy_version for event in published), default=-1)
        raise ConfigError(
            f"policy version {version} was not published; the newest is {newest}; give "
            "--to-version a published version"
        )
    if any(plan.parse_entity(topic) == PROMPT_GROUPS for topic, _ in topic_partitions):
        raise ConfigError(
            "prompt groups are not ordered by version; reset rollout by --to-time, "
            "--to-offset, --to-beginning or --to-end"
        )
    starts: dict[tuple[str, int], int] = {}
    for event in sorted(published, key=lambda event: event.policy_version):
        for at in event.start_offsets if event.policy_version >= version else ():
            starts.setdefault((plan.parse_entity(at.topic), at.partition), at.offset)
    return {
        topic_partition: starts.get(
            (plan.parse_entity(topic_partition[0]), topic_partition[1]), ends[topic_partition]
        )
        for topic_partition in topic_partitions
    }


def parse_offsets(
    plan: TopicPlan, topic_partitions: Collection[TopicPartition], texts: Sequence[str]
) -> dict[TopicPartition, int]:
    """Parse offsets such as `rollout.samples[2]@17`; the topic may carry its full name.

    Raises:
        ConfigError: A text is malformed, or names no partition that the role reads.
    """
    offsets = {}
    for text in texts:
        match = OFFSET_PATTERN.fullmatch(text)
        if match is None:
            raise ConfigError(
                f"--to-offset {text!r} is malformed; write topic[partition]@offset, for "
                "example rollout.samples[0]@17"
            )
        topic = match["topic"]
        topic_partition = (
            topic if topic.startswith(plan.topic("")) else plan.topic(topic),
            int(match["partition"]),
        )
        if topic_partition not in topic_partitions:
            readable = sorted({plan.parse_entity(name) for name, _ in topic_partitions})
            raise ConfigError(
                f"--to-offset {text!r} is not read by the role; it reads "
                f"{', '.join(readable)}, partitions below {len(topic_partitions)}"
            )
        offsets[topic_partition] = int(match["offset"])
    return offsets


def parse_time_ms(text: str) -> int:
    """Return milliseconds since the epoch of an ISO 8601 time; one without a zone is UTC.

    Raises:
        ConfigError: The text is no time.
    """
    try:
        parsed = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(f"{text!r} is no time; write it like 2026-01-31T12:00:00Z") from None
    return int((parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp() * 1000)


def require_safe_reset(admin: Admin, plan: ResetPlan, *, allow: Collection[str] = ()) -> None:
    """Refuse a reset that live members would undo, and a dangerous one without consent.

    Raises:
        BrokerRefused: The text names the members, or the danger and its option.
    """
    group = admin.groups(plan.consumer_group).get(plan.consumer_group)
    if group and group.members:
        members = ", ".join(f"{member.client_id} at {member.host}" for member in group.members)
        raise BrokerRefused(
            f"consumer group {plan.consumer_group} has live members: {members}; stop them "
            "first, then reset"
        )
    for danger in plan.dangers:
        if danger not in allow:
            raise BrokerRefused(
                f"resetting {plan.role}: {DANGERS[danger]}; agree with --allow {danger}"
            )


def apply_reset(admin: Admin, plan: ResetPlan, *, allow: Collection[str] = ()) -> None:
    """Move the offsets; raises as `require_safe_reset`, and then nothing was changed."""
    require_safe_reset(admin, plan, allow=allow)
    if plan.moves:
        admin.set_committed_offsets(
            plan.consumer_group,
            [TopicOffset(*move.topic_partition, move.after) for move in plan.moves],
        )
