"""Deletes records that only policy versions older than the retained versions own, and never a
record that is still needed.

A record may be deleted up to the lowest of these offsets:

    versions    the start of the oldest retained version of its slot
    groups      the committed offset of every role that reads it
    recovery    the first record of any step after the newest usable checkpoint, and the
                trainer's next offset
    critic      (in a run with a critic) the first record of any step after its newest checkpoint
    followers   the checkpoint of every run that trains this run's samples, unless it is more than
                `run.follower_versions` behind the retained versions
    slots       (prompt queue) the first record whose batch slot, or in order its step, was not
                trained for a version that is not retained

Control topics are never purged: they are the ledger.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from relax_events.config import RunConfig, RunSection
from relax_events.events.parts import TopicOffset
from relax_events.events.types import PolicyVersionPublished, PromptGroupIssued, TrainStepCommitted
from relax_events.kafka.admin import Admin
from relax_events.staleness import BatchSlot as BatchSlot
from relax_events.topics import TopicPlan, compute_slot
from relax_events.topics.names import PROMPT_GROUPS, TRAINER_INPUTS, TRAINING_SAMPLES
from relax_events.topics.partitions import TopicPartition
from relax_events.topics.plan import list_input_partitions, list_role_inputs


@dataclass(frozen=True, slots=True)
class DeleteRange:
    """The records to delete from one partition: from `begin` up to, not including, `end`. `held_by`
    names the bound that keeps the next record.
    """

    topic_partition: TopicPartition
    begin: int
    end: int
    held_by: str

    @property
    def num_records(self) -> int:
        """Number of records to delete."""
        return max(self.end - self.begin, 0)


@dataclass(frozen=True, slots=True)
class QueuedGroup:
    """A record of the prompt queue; `issued` is None if it can't be read."""

    partition: int
    offset: int
    issued: PromptGroupIssued | None


Bounds = Mapping[TopicPartition, int]


def oldest_retained(
    run: RunSection, *, newest_version: int, before_version: int | None = None
) -> int:
    """Return the first policy version whose records are kept, at most the start of the trainer's
    window.

    Args:
        run: `retain_versions` applies where no version is given; 0 retains all.
        newest_version: The newest published version.
        before_version: Delete records of older versions.
    """
    retained = run.retain_versions
    first_version = (
        before_version
        if before_version is not None
        else newest_version - retained + 1
        if retained
        else 0
    )
    return max(min(first_version, newest_version - run.max_staleness), 0)


def version_bounds(
    plan: TopicPlan, published: Iterable[PolicyVersionPublished], *, before_version: int
) -> dict[TopicPartition, int]:
    """Return the offset of each sample partition below which only versions before `before_version`
    lie.

    Where the slot has no retained version yet, its newest owner's start is the bound, and its
    records stay.
    """
    by_slot: dict[int, list[PolicyVersionPublished]] = {}
    for event in published:
        by_slot.setdefault(compute_slot(event.policy_version, num_slots=plan.num_slots), []).append(
            event
        )
    bounds: dict[TopicPartition, int] = {}
    for owners in by_slot.values():
        owners.sort(key=lambda event: event.policy_version)
        owner = next(
            (event for event in owners if event.policy_version >= before_version), owners[-1]
        )
        bounds |= {
            (plan.topic(plan.parse_entity(at.topic)), at.partition): at.offset
            for at in owner.start_offsets
        }
    return bounds


def oldest_with_records(
    plan: TopicPlan, published: Iterable[PolicyVersionPublished], begins: Bounds
) -> int:
    """Return the oldest policy version that may have records left: data of older versions alone may
    be deleted.

    A version's records are gone where the records of its slot begin at or behind the start of the
    slot's next owner.

    Args:
        plan: The run's topics.
        published: The newest versions, without a gap.
        begins: The oldest offset that is left, by partition of the sample topics.
    Returns:
        0 where records are left of versions that are older than the published ones given here.
    """
    starts = {event.policy_version: event.start_offsets for event in published}

    def has_older(version: int) -> bool:
        return any(
            begins.get((plan.topic(plan.parse_entity(at.topic)), at.partition), 0) < at.offset
            for at in starts[version]
        )

    oldest = min(starts, default=0)
    if any(
        has_older(version)
        for version in range(oldest, oldest + plan.num_slots)
        if version in starts
    ):
        return 0
    while oldest + plan.num_slots in starts and not has_older(oldest + plan.num_slots):
        oldest += 1
    return oldest


def recovery_bounds(
    plan: TopicPlan,
    steps: Iterable[TrainStepCommitted],
    *,
    checkpoint_version: int,
    positions: Mapping[tuple[str, int], int],
) -> dict[TopicPartition, int]:
    """Return the first offset of each partition that a restarted trainer reads.

    It trains the steps from the checkpoint's version on again, from their recorded offsets, then
    continues at the steps' consumed offsets.

    Args:
        plan: The run's topics.
        steps: The committed steps, at least the steps from the checkpoint's version on.
        checkpoint_version: Of the newest usable checkpoint; 0 when there is none.
        positions: Offsets that the steps have consumed, by entity and partition.
    """
    topic = plan.topic(TRAINING_SAMPLES)
    bounds = {
        (plan.topic(entity), partition): positions.get((entity, partition), 0)
        for entity in TRAINER_INPUTS
        for partition in range(plan.num_sample_partitions)
    }
    for step in steps:
        if step.train_step >= checkpoint_version:
            for partition, offset in step.positions:
                bounds[topic, partition] = min(offset, bounds[topic, partition])
    return bounds


def queue_bounds(
    plan: TopicPlan,
    queued: Iterable[QueuedGroup],
    *,
    ended: Collection[str],
    trained: Mapping[BatchSlot, int],
    before_version: int,
    in_order: bool = False,
) -> dict[TopicPartition, int]:
    """Return the offset of each queue partition below which every prompt group has ended and its
    batch slot was trained long ago; in order, below which every prompt group's step was.

    The record with the highest row is kept with all records after it: a restarted prompter derives
    the next prompt from it.

    Args:
        plan: The run's topics.
        queued: The queue's records, in order per partition.
        ended: Ids of the prompt groups that ended.
        trained: The train step that trained each batch slot.
        before_version: A batch slot counts when the version that its step made is older.
        in_order: Whether a step trains only prompt groups issued for it, so that none of an older
            step is needed. Spares of it may have no outcome.
    """
    bounds = dict.fromkeys(
        ((plan.topic(PROMPT_GROUPS), partition) for partition in range(plan.queue_partitions)), 0
    )
    closed: set[int] = set()
    newest: tuple[int, int, int] = (-1, 0, 0)
    for item in queued:
        if item.issued is None:
            continue  # an unreadable record is deleted with its neighbours
        newest = max(newest, (item.issued.row, item.partition, item.offset))
        step = trained.get(BatchSlot(item.issued.train_step, item.issued.group_index))
        if in_order:
            is_done = item.issued.train_step + 1 < before_version
        else:
            is_done = (
                item.issued.prompt_group_id in ended
                and step is not None
                and step + 1 < before_version
            )
        if not is_done:
            closed.add(item.partition)
        if item.partition not in closed:
            bounds[plan.topic(PROMPT_GROUPS), item.partition] = item.offset + 1
    row, partition, offset = newest
    if row >= 0:
        bounds[plan.topic(PROMPT_GROUPS), partition] = min(
            offset, bounds[plan.topic(PROMPT_GROUPS), partition]
        )
    return bounds


def group_bounds(config: RunConfig, admin: Admin) -> dict[str, Bounds]:
    """Return, for each role, its committed offset at every partition that it reads; 0 if none."""
    plan = TopicPlan.from_config(config)
    bounds: dict[str, Bounds] = {}
    for role in list_role_inputs(config):
        topic_partitions = list_input_partitions(config, role)
        committed = admin.committed_offsets(plan.consumer_group(role), topic_partitions)
        bounds[role] = {
            topic_partition: committed.get(topic_partition, 0)
            for topic_partition in topic_partitions
        }
    return bounds


def bounded_ranges(
    begins: Bounds, targets: Bounds, bounds: Mapping[str, Bounds]
) -> list[DeleteRange]:
    """Return the ranges to delete: up to the target offsets, and not beyond any bound.

    Args:
        begins: The oldest available offset, by topic partition.
        targets: The first offset to keep, by topic partition.
        bounds: The first offset that others still need, by their name.
    """
    ranges = []
    for topic_partition, target in sorted(targets.items()):
        limits = [
            (target, "versions"),
            *(
                (bound[topic_partition], name)
                for name, bound in bounds.items()
                if topic_partition in bound
            ),
        ]
        below, held_by = min(limits, key=lambda limit: limit[0])
        ranges.append(
            DeleteRange(
                topic_partition,
                begins[topic_partition],
                max(below, begins[topic_partition]),
                held_by,
            )
        )
    return ranges


def delete_ranges(admin: Admin, ranges: Iterable[DeleteRange]) -> int:
    """Delete the records of the ranges; return their number."""
    real = [delete_range for delete_range in ranges if delete_range.num_records]
    admin.delete_records(
        [TopicOffset(*delete_range.topic_partition, delete_range.end) for delete_range in real]
    )
    return sum(delete_range.num_records for delete_range in real)
