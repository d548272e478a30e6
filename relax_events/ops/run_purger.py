"""Plans and performs purges of one run, from the state that the control log gives."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256

import structlog

from relax_events.config import RunConfig
from relax_events.errors import ConfigError, CorruptRecord, ObjectError, SchemaError
from relax_events.events.codec import EventCodec
from relax_events.events.parts import CheckpointRef, Outcome
from relax_events.events.types import (
    Event,
    PolicyVersionPublished,
    PromptGroupEnded,
    PromptGroupIssued,
    TrainStepCommitted,
)
from relax_events.history.run_log import RunLog
from relax_events.kafka.admin import Admin
from relax_events.kafka.connection import Connection
from relax_events.kafka.inventory import Inventory
from relax_events.kafka.log_reader import LogReader
from relax_events.objects import ObjectStore
from relax_events.objects.version_objects import delete_objects_before
from relax_events.ops.dependent_runs import dependent_run_bounds, find_dependent_runs
from relax_events.ops.purge import (
    Bounds,
    DeleteRange,
    QueuedGroup,
    bounded_ranges,
    delete_ranges,
    group_bounds,
    oldest_retained,
    oldest_with_records,
    queue_bounds,
    recovery_bounds,
    version_bounds,
)
from relax_events.projections.base import apply_events
from relax_events.projections.training_history import advance_positions
from relax_events.staleness import BatchSlot as BatchSlot
from relax_events.topics import TopicPlan
from relax_events.topics.names import (
    GROUP_OUTCOMES,
    POLICY_VERSIONS,
    PROMPT_GROUPS,
    TRAIN_STEPS,
    TRAINING_SAMPLES,
)
from relax_events.topics.partitions import TopicPartition
from relax_events.training.checkpoint.critic_checkpoints import list_critic_checkpoints

log = structlog.get_logger()
SAMPLED_RECORDS = 20


@dataclass(slots=True)
class RetentionState:
    """The state that a purge needs, folded from the control log.

    Events are applied in log order within each topic; topics have no order among each other.
    """

    steps: list[TrainStepCommitted] = field(default_factory=list)
    num_steps_before: int = 0
    """Number of steps that are not in `steps`: committed before the log that was read, or
    dropped."""
    positions: dict[tuple[str, int], int] = field(default_factory=dict)
    """The next offset of the trainer's input, by entity and partition."""
    published: dict[int, PolicyVersionPublished] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)
    trained: dict[BatchSlot, int] = field(default_factory=dict)

    def apply(self, event: Event) -> None:
        """Apply an event of the control log."""
        if isinstance(event, TrainStepCommitted):
            self.steps.append(event)
            advance_positions(self.positions, event.consumed)
        elif isinstance(event, PolicyVersionPublished):
            if not self.published:  # the steps that it counts lie before the records that are read
                self.num_steps_before += event.num_steps_before
            self.published[event.policy_version] = event
        elif isinstance(event, PromptGroupEnded):
            self.ended.add(event.prompt_group_id)
            if event.outcome is Outcome.TRAINED:
                self.trained[BatchSlot(event.train_step, event.group_index)] = event.trainer_version

    @property
    def newest_version(self) -> int:
        """The newest published version, -1 before the first."""
        return max(self.published, default=-1)

    @property
    def newest_checkpoint(self) -> CheckpointRef | None:
        """The newest checkpoint that a committed step names."""
        return next(
            (step.checkpoint for step in reversed(self.steps) if step.checkpoint is not None), None
        )

    def forget_before(self, version: int) -> None:
        """Drop steps and publications of versions that no later purge needs, so that the cost of a
        purge does not grow with the run.
        """
        kept = [step for step in self.steps if step.train_step >= version]
        self.num_steps_before += len(self.steps) - len(kept)
        self.steps = kept
        for old in [old for old in self.published if old < version]:
            del self.published[old]

    def keep_only(self, queued: Collection[PromptGroupIssued]) -> None:
        """Drop the outcomes of all prompt groups but the queued ones: a purge needs no others, and
        an outcome follows its issue.
        """
        ids, batch_slots = (
            {issued.prompt_group_id for issued in queued},
            {BatchSlot(issued.train_step, issued.group_index) for issued in queued},
        )
        self.ended &= ids
        self.trained = {
            batch_slot: version
            for batch_slot, version in self.trained.items()
            if batch_slot in batch_slots
        }


class Purger:
    """Plans purges of one run and performs them; needs the broker, the object store for the
    checkpoint, and the retention state.
    """

    def __init__(
        self, config: RunConfig, connection: Connection, store: ObjectStore, codec: EventCodec
    ) -> None:
        """Open an admin client.

        Args:
            config: The run.
            connection: To its broker.
            store: Where its checkpoints lie.
            codec: A codec that learns the schemas of the run's writers.
        """
        self._config, self._connection, self._store, self._codec = config, connection, store, codec
        self._plan = TopicPlan.from_config(config)
        self._admin, self._inventory = Admin(connection), Inventory(connection)
        self.oldest_with_records = 0
        """The oldest version with records after the newest purge."""

    def plan(
        self, state: RetentionState, *, before_version: int | None = None
    ) -> list[DeleteRange]:
        """Return the ranges to delete from each partition of the sample topics and the prompt
        queue.

        Args:
            state: The retention state.
            before_version: Delete records of older versions; by default records of versions that
                `run.retain_versions` doesn't retain.
        """
        oldest = oldest_retained(
            self._config.run, newest_version=state.newest_version, before_version=before_version
        )
        targets = version_bounds(self._plan, state.published.values(), before_version=oldest)
        queue = [
            (self._plan.topic(PROMPT_GROUPS), partition)
            for partition in range(self._plan.queue_partitions)
        ]
        begins = self._admin.beginning_offsets([*targets, *queue])
        queued = self._queued(begins, queue)
        targets |= queue_bounds(
            self._plan,
            queued,
            ended=state.ended,
            trained=state.trained,
            before_version=oldest,
            in_order=self._config.run.sample_order == "fifo",
        )
        state.keep_only([group.issued for group in queued if group.issued is not None])
        usable = self._usable_checkpoint(state)
        version = usable.policy_version if usable else 0
        is_known = (
            bool(usable) or state.num_steps_before == 0
        )  # else older steps would be trained again, and their records are unknown
        positions = state.positions if is_known else {}
        recovery = recovery_bounds(
            self._plan, state.steps, checkpoint_version=version, positions=positions
        )
        bounds = (
            group_bounds(self._config, self._admin)
            | {"recovery": recovery}
            | self._critic_bounds(state)
        )
        return bounded_ranges(begins, targets, bounds | self._follower_bounds(state, oldest))

    def purge(self, ranges: list[DeleteRange], state: RetentionState) -> Counter[str]:
        """Delete the ranges, then the objects of versions that have no records left; return the
        number of deleted records by entity.

        Raises:
            StoreUnavailable: The records are deleted, the objects will be with the next purge.
        """
        delete_ranges(self._admin, ranges)
        begins = self._admin.beginning_offsets(
            delete_range.topic_partition
            for delete_range in ranges
            if self._plan.parse_entity(delete_range.topic_partition[0]) != PROMPT_GROUPS
        )
        self.oldest_with_records = oldest = oldest_with_records(
            self._plan, state.published.values(), begins
        )
        if num_objects := delete_objects_before(self._store, oldest):
            log.info("objects.purged", before_version=oldest, num_objects=num_objects)
        deleted = Counter[str]()
        for delete_range in ranges:
            deleted[self._plan.parse_entity(delete_range.topic_partition[0])] += (
                delete_range.num_records
            )
        return +deleted

    def estimate_bytes(self, ranges: list[DeleteRange]) -> dict[TopicPartition, int]:
        """Return the approximate size of each range, extrapolated from its first records."""
        reader = LogReader(self._connection)
        spans = {
            delete_range.topic_partition: (
                delete_range.begin,
                min(delete_range.end, delete_range.begin + SAMPLED_RECORDS),
            )
            for delete_range in ranges
            if delete_range.num_records
        }
        sizes: dict[TopicPartition, list[int]] = {topic_partition: [] for topic_partition in spans}
        try:
            for record in reader.stream(spans):
                sizes[record.topic, record.partition].append(len(record.value) + len(record.key))
        finally:
            reader.close()
        counts = {delete_range.topic_partition: delete_range.num_records for delete_range in ranges}
        return {
            topic_partition: round(sum(record_sizes) / len(record_sizes) * counts[topic_partition])
            if record_sizes
            else 0
            for topic_partition, record_sizes in sizes.items()
        }

    def close(self) -> None:
        """Close the admin client."""
        self._admin.close()

    def _queued(
        self, begins: dict[TopicPartition, int], queue: list[TopicPartition]
    ) -> list[QueuedGroup]:
        """Read the rest of the prompt queue: small records, and few of them where purges run
        regularly.
        """
        reader = LogReader(self._connection)
        try:
            ends = self._admin.end_offsets(queue)
            records = reader.stream(
                {
                    topic_partition: (begins[topic_partition], ends[topic_partition])
                    for topic_partition in queue
                }
            )
            return [
                QueuedGroup(record.partition, record.offset, self._issued(record.value))
                for record in records
            ]
        finally:
            reader.close()

    def _issued(self, value: bytes) -> PromptGroupIssued | None:
        try:
            event = self._codec.decode(value)
        except (CorruptRecord, SchemaError):
            return None
        return event if isinstance(event, PromptGroupIssued) else None

    def _follower_bounds(self, state: RetentionState, oldest: int) -> dict[str, Bounds]:
        """Return the offsets that runs which train this run's samples still need, for as many
        versions as the run keeps for them.
        """
        limit = self._config.run.follower_versions
        if not limit:
            return {}
        floor = version_bounds(
            self._plan, state.published.values(), before_version=max(oldest - limit, 0)
        )
        return dependent_run_bounds(
            find_dependent_runs(self._plan, self._admin, self._inventory), floor
        )

    def _critic_bounds(self, state: RetentionState) -> dict[str, Bounds]:
        """Return the offsets that a restarted critic reads; all records are held while it has no
        checkpoint.
        """
        if "critic" not in self._config.roles():
            return {}
        digests = {step.policy_version: step.weights_digest for step in state.steps}
        newest = next(list_critic_checkpoints(self._store, digests=digests), None)
        consumed = newest.consumed if newest else {}
        topic = self._plan.topic(TRAINING_SAMPLES)
        return {
            "critic's steps": {
                (topic, partition): consumed.get(partition, 0)
                for partition in range(self._plan.num_sample_partitions)
            }
        }

    def _usable_checkpoint(self, state: RetentionState) -> CheckpointRef | None:
        """Return the newest complete checkpoint: its manifest as committed, and every shard that it
        names.
        """
        for reference in dict.fromkeys(step.checkpoint for step in reversed(state.steps)):
            if reference is not None and self._is_usable(reference):
                return reference
        return None

    def _is_usable(self, reference: CheckpointRef) -> bool:
        try:
            data = self._store.get_at(self._store.key(reference.uri))
            if sha256(data).digest() != reference.digest:
                return False
            return all(
                self._store.exists(self._store.key(shard["uri"]))
                for shard in json.loads(data)["shards"]
            )
        except (ObjectError, ValueError, KeyError) as error:
            log.debug("checkpoint.rejected", uri=reference.uri, error=str(error))
            return False


@dataclass(frozen=True, slots=True)
class PlannedPurge:
    """A purge that can be inspected before it is performed."""

    before_version: int
    ranges: list[DeleteRange]
    purger: Purger
    state: RetentionState

    def estimate_bytes(self) -> dict[TopicPartition, int]:
        """Return the approximate size of each range."""
        return self.purger.estimate_bytes(self.ranges)

    def apply(self) -> Counter[str]:
        """Delete the records; return their number by entity."""
        deleted = self.purger.purge(self.ranges, self.state)
        log.info("records.purged", before_version=self.before_version, num_records=deleted.total())
        return deleted


@contextmanager
def open_purge(config: RunConfig, *, before_version: int | None = None) -> Iterator[PlannedPurge]:
    """Read a run's control log and plan a purge.

    Args:
        config: The run, with the broker's address filled in.
        before_version: Delete records of older versions; by default all but the newest
            `run.retain_versions`.
    Raises:
        ConfigError: Nothing selects versions, the version was never published, or the run is a
            replay.
    """
    if config.is_replay:
        raise ConfigError(
            f"run {config.run.id} replays run {config.parent.run} and has no samples of its "
            "own; purge that one"
        )
    if before_version is None and not config.run.retain_versions:
        raise ConfigError(
            "the run file sets no run.retain_versions; set it, or give --before-version"
        )
    state = RetentionState()
    with RunLog(config, name="purge") as run_log:
        apply_events(
            run_log.read_control_events(POLICY_VERSIONS, TRAIN_STEPS, GROUP_OUTCOMES),
            state,
        )
        if before_version is not None and before_version > state.newest_version:
            raise ConfigError(
                f"policy version {before_version} was not published; the newest is "
                f"{state.newest_version}"
            )
        purger = Purger(
            config,
            run_log.connection,
            ObjectStore.open(config.objects_uri, uri_aliases=config.objects.uri_aliases),
            run_log.codec,
        )
        try:
            oldest = oldest_retained(
                config.run, newest_version=state.newest_version, before_version=before_version
            )
            yield PlannedPurge(
                oldest, purger.plan(state, before_version=before_version), purger, state
            )
        finally:
            purger.close()
