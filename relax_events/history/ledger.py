"""Reads a run's log into a ledger, each topic once and all in step with each other, so that a run
of any length fits into memory.

    policy versions: which offsets belong to which versions ──▶ the next versions that make a block
        of records
    block: prompt queue ─▶ samples, scores and ready samples of these versions ─▶ train steps,
        outcomes ─▶ finalize ─▶ the next block

Where a topic is not sorted by versions, it is read until its newest record shows that the block's
are read. That only decides how much is held in memory: a late record is checked all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

import structlog

from relax_events.config import RunConfig
from relax_events.errors import BrokerError, ObjectError
from relax_events.events.codec import names_schema
from relax_events.events.generations import describe_differences
from relax_events.events.parts import TopicOffset
from relax_events.events.types import (
    Event,
    PolicyVersionPublished,
    PromptGroupEnded,
    PromptGroupIssued,
    SampleReady,
    SampleRolledOut,
    TrainStepCommitted,
)
from relax_events.history.ledger_advantages import RecordedAdvantages, list_recorded_settings
from relax_events.history.run_log import OffsetRange, RunLog, TopicPartition
from relax_events.history.stored_weights import StoredWeights
from relax_events.kafka.records import Record
from relax_events.objects.claim_check import check_out
from relax_events.projections.ledger import Ledger
from relax_events.projections.ledger_findings import Comparison, Rule
from relax_events.projections.purged_ranges import PurgedRanges
from relax_events.runtime.issue_rules import IssueRules
from relax_events.runtime.run_description import ParentRun
from relax_events.staleness import is_external
from relax_events.topics import TopicPlan
from relax_events.topics.names import (
    GROUP_OUTCOMES,
    LOGPROB_TOPICS,
    POLICY_VERSIONS,
    PROMPT_GROUPS,
    REWARD_SCORES,
    ROLLOUT_SAMPLES,
    TRAIN_STEPS,
    TRAINER_INPUTS,
    TRAINING_SAMPLES,
)

log = structlog.get_logger()
BLOCK_RECORDS = 5_000
"""About how many records of samples are checked together, each of up to a prompt group; every block
costs a few requests."""
BLOCK_VERSIONS = 256
CHUNK_RECORDS = 2_000
LARGE_CHUNK_RECORDS = 64
"""Chunk of records that name all samples of a step, or all partitions of a version."""
PROGRESS_RECORDS = 500
REST = 2**62
"""Stands for the version after the last block."""
DECISION_TOPICS = (
    POLICY_VERSIONS,
    TRAIN_STEPS,
    GROUP_OUTCOMES,
)

OnProgress = Callable[[int, int], None]
OneSample = TypeVar("OneSample", SampleRolledOut, SampleReady)


def _say_nothing(num_read: int, num_records: int) -> None:
    """Stand for a caller that does not ask."""


class OffsetReader(Protocol):
    """Reads the oldest and the next offset of a partition."""

    def watermarks(self, topic: str, partition: int) -> OffsetRange:
        """Request them from the broker."""


def read_ledger(config: RunConfig, *, on_progress: OnProgress = _say_nothing) -> Ledger:
    """Read a run's log into a ledger; of a replay also the parent's steps that it was to train.

    Args:
        config: The run, with the broker's address filled in.
        on_progress: Called every 500 records with the number of records that are read and that
            there are; what it raises ends the reading.
    Raises:
        BrokerError: A record fails its checksum: a log that can't be read is not called clean.
        ConfigError: The broker has no topics of this run.
    """
    with RunLog(config, name="ledger", with_versions=False) as run_log:
        return LedgerReader(run_log, on_progress=on_progress).read()


def stable_ranges(
    reader: OffsetReader, decisions: Sequence[TopicPartition]
) -> dict[TopicPartition, OffsetRange]:
    """Return offset ranges of these topics that end all before or all after any commit of the
    running trainer.

    A step's records become visible together, but end offsets are requested one after the other. So
    they are requested again until none has moved.
    """
    seen: dict[TopicPartition, OffsetRange] = {}
    while (
        spans := {
            topic_partition: (0, reader.watermarks(*topic_partition)[1])
            for topic_partition in decisions
        }
    ) != seen:
        seen = spans
    return spans


class LedgerReader:
    """See the module's docstring. Reads once."""

    def __init__(self, run_log: RunLog, *, on_progress: OnProgress = _say_nothing) -> None:
        self._on_progress, self._num_processed = on_progress, 0
        self._log, self._config, self._plan = run_log, run_log.config, run_log.plan
        config = run_log.config
        decisions = [
            (TopicPlan.build_topic_name(config.run.id, entity), 0) for entity in DECISION_TOPICS
        ]
        self._versions_partition, self._steps_partition, self._ends_partition = decisions
        self._spans = stable_ranges(run_log, decisions)
        self._samples, self._queue = self._list_sample_partitions(), self._list_queue_partitions()
        self._spans |= {
            topic_partition: run_log.watermarks(*topic_partition)
            for topic_partition in [*self._queue, *self._samples]
        }  # samples were written before the decisions about them
        self._num_records = sum(stop - start for start, stop in self._spans.values())
        self._read_up_to = {
            topic_partition: span[0] for topic_partition, span in self._spans.items()
        }
        self._stamps: dict[TopicPartition, int] = {}
        self._starts: dict[int, dict[TopicPartition, int]] = {}
        begins = {
            (self._plan.parse_entity(topic), partition): self._spans[topic, partition][0]
            for topic, partition in [*self._queue, *self._samples]
        }
        self._weights = StoredWeights(config)
        self._ledger = Ledger(
            config.run.max_staleness,
            first_version=config.first_version,
            last_version=config.last_version,
            in_order=config.run.sample_order == "fifo",
            has_rewards=config.algorithm.has_rewards,
            purged=None if config.is_replay else PurgedRanges(self._plan, begins),
            is_replay=config.is_replay,
            advantages=None
            if config.is_replay
            else RecordedAdvantages(list_recorded_settings(run_log), self._weights.store),
            is_foreign=IssueRules.from_config(config).is_foreign,
        )
        self._source = _source_steps(run_log) if config.is_replay else iter(())

    def _list_sample_partitions(self) -> list[TopicPartition]:
        """Return where samples are on the log; none for a replay, which has its parent's."""
        if self._config.is_replay:
            return []
        scores = (REWARD_SCORES,) if self._config.algorithm.has_rewards else ()
        return [
            (self._plan.topic(name), partition)
            for name in (ROLLOUT_SAMPLES, *scores, *LOGPROB_TOPICS.values(), *TRAINER_INPUTS)
            for partition in range(self._plan.num_sample_partitions)
        ]

    def _list_queue_partitions(self) -> list[TopicPartition]:
        """Return where prompt groups are on the log; none for a replay."""
        num_partitions = 0 if self._config.is_replay else self._plan.queue_partitions
        return [(self._plan.topic(PROMPT_GROUPS), at) for at in range(num_partitions)]

    def read(self) -> Ledger:
        """Read everything, block by block."""
        below = self._config.first_version
        while not self._is_read():
            below = self._next_block(below)
            self._read_queue(below)
            self._read_samples(below)
            self._read_source(below)
            self._read_until([self._steps_partition], below - 1, chunk=LARGE_CHUNK_RECORDS)
            self._read_until([self._ends_partition], below, chunk=CHUNK_RECORDS)
            self._ledger.finalize(below)
        self._weights.check(self._ledger)
        self._name_differences()
        unreadable = self._log.unreadable
        if unreadable.count:
            log.warning("records.decode_failed", count=unreadable.count, first=unreadable.named[0])
        return self._ledger

    def _name_differences(self) -> None:
        """Read the records of a few findings again, and name the fields in which they differ."""
        for example, at in self._ledger.comparisons.items():
            try:
                generated = self._read_sample(ROLLOUT_SAMPLES, at, SampleRolledOut)
                ready = self._read_sample(TRAINING_SAMPLES, at, SampleReady)
            except (BrokerError, ObjectError, StopIteration) as error:
                log.warning("records.not_compared", sample_id=at.sample_id, error=str(error))
                continue
            has_segments = self._config.algorithm.has_rewards
            difference = describe_differences(generated, ready, has_segments=has_segments)
            self._ledger.add_difference(example, difference or "its versions or generation differ")

    def _read_sample(self, entity: str, at: Comparison, kind: type[OneSample]) -> OneSample:
        offset = at.generated_offset if entity == ROLLOUT_SAMPLES else at.ready_offset
        records = self._log.read_at(entity, [(at.partition, offset)], kind)
        sample = next(one.event for one in records if one.event.sample_id == at.sample_id)
        return sample if self._weights.store is None else check_out(sample, self._weights.store)

    def _is_read(self) -> bool:
        return all(
            position >= self._spans[topic_partition][1]
            for topic_partition, position in self._read_up_to.items()
        )

    def _next_block(self, below: int) -> int:
        """Return the version that ends the next block: at least one more, and as many as make a
        block of records; at the end the rest.
        """
        for version in [version for version in self._starts if version < below]:
            del self._starts[version]
        reached = below + 1
        self._read_versions(reached + 1)
        while (
            reached + 1 <= min(self._newest_start, below + BLOCK_VERSIONS)
            and self._count_records(reached + 1) <= BLOCK_RECORDS
        ):
            reached += 1
            self._read_versions(reached + 1)
        return reached if reached <= self._newest_start else REST

    def _read_versions(self, below: int) -> None:
        """Read where the next versions in each slot start."""
        self._read_until(
            [self._versions_partition], below + self._plan.num_slots, chunk=LARGE_CHUNK_RECORDS
        )

    @property
    def _newest_start(self) -> int:
        return max(self._starts, default=-1)

    def _count_records(self, below: int) -> int:
        return sum(
            stop - self._read_up_to[topic_partition]
            for topic_partition, stop in self._stops(below).items()
        )

    def _stops(self, below: int) -> dict[TopicPartition, int]:
        """Return, for each sample partition, where records of versions from `below` on start; its
        end where there are none.
        """
        starts: dict[TopicPartition, int] = {}
        for version in sorted(version for version in self._starts if version >= below):
            if len(starts) == len(self._samples):
                break
            starts = self._starts[version] | starts
        ends = {
            topic_partition: self._spans[topic_partition][1] for topic_partition in self._samples
        }
        return {
            topic_partition: min(
                max(starts.get(topic_partition, end), self._read_up_to[topic_partition]), end
            )
            for topic_partition, end in ends.items()
        }

    def _read_samples(self, below: int) -> None:
        self._read_ranges(self._stops(below))

    def _read_queue(self, below: int) -> None:
        """Read the prompt groups issued before version `below`: step s is issued when version s -
        max_staleness is published.
        """
        self._read_until(
            self._queue, below + self._config.run.max_staleness + 1, chunk=CHUNK_RECORDS
        )

    def _read_source(self, below: int) -> None:
        for step in self._source:
            self._ledger.apply_parent_step(step)
            if step.train_step >= below:
                return

    def _read_until(
        self, topic_partitions: Sequence[TopicPartition], stamp: int, *, chunk: int
    ) -> None:
        """Read these partitions until the newest record of each has this step or version, or they
        end.
        """
        while spans := {
            topic_partition: min(
                self._read_up_to[topic_partition] + chunk, self._spans[topic_partition][1]
            )
            for topic_partition in topic_partitions
            if self._is_behind(topic_partition, stamp)
        }:
            self._read_ranges(spans)

    def _is_behind(self, topic_partition: TopicPartition, stamp: int) -> bool:
        return (
            self._stamps.get(topic_partition, -1) < stamp
            and self._read_up_to[topic_partition] < self._spans[topic_partition][1]
        )

    def _read_ranges(self, stops: Mapping[TopicPartition, int]) -> None:
        spans = {
            topic_partition: (self._read_up_to[topic_partition], stop)
            for topic_partition, stop in stops.items()
            if stop > self._read_up_to[topic_partition]
        }
        for record in self._log.records(spans):
            self._process(record)
        self._read_up_to |= {topic_partition: stop for topic_partition, (_, stop) in spans.items()}

    def _process(self, record: Record) -> None:
        self._num_processed += 1
        if self._num_processed % PROGRESS_RECORDS == 0:
            self._on_progress(self._num_processed, self._num_records)
        topic_partition, at = (
            (record.topic, record.partition),
            TopicOffset(record.topic, record.partition, record.offset),
        )
        events = self._log.decode_samples(record)
        if not events:
            self._ledger.count_unreadable()
            is_control = self._plan.parse_entity(record.topic).startswith("control.")
            if is_control and names_schema(record.value):
                self._ledger.add_finding(Rule.UNREADABLE_CONTROL, record.location)
            return
        for event in events:
            self._ledger.apply(event, at, key=record.key)
            self._weights.apply(event)
        self._record_progress(topic_partition, events[0])

    def _record_progress(self, topic_partition: TopicPartition, event: Event) -> None:
        if isinstance(event, PolicyVersionPublished):
            starts = {(start.topic, start.partition): start.offset for start in event.start_offsets}
            self._starts[event.policy_version] = {
                topic_partition: starts[topic_partition]
                for topic_partition in self._samples
                if topic_partition in starts
            }
            self._stamps[topic_partition] = event.policy_version
        elif isinstance(event, TrainStepCommitted) or (
            isinstance(event, PromptGroupIssued) and not is_external(event.prompt_group_id)
        ):
            self._stamps[topic_partition] = event.train_step
        elif isinstance(event, PromptGroupEnded):
            self._stamps[topic_partition] = event.trainer_version


def _source_steps(run_log: RunLog) -> Iterator[TrainStepCommitted]:
    """Give the steps of the source that a replay trains."""
    config = run_log.config
    until = config.parent.until_version
    for step in ParentRun.read(run_log.connection, config.parent.run).steps():
        if config.first_version <= step.train_step and (until < 0 or step.train_step < until):
            yield step
