"""The training since the newest checkpoint, folded from the control log: how the trainer resumes
after a crash.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from relax_events.errors import BrokerUnavailable, RunFailed
from relax_events.events.parts import CheckpointRef, TopicOffset
from relax_events.events.types import (
    Event,
    PolicyVersionPublished,
    PromptGroupEnded,
    TrainStepCommitted,
)
from relax_events.kafka.log_reader import LogReader
from relax_events.projections.base import apply_events
from relax_events.runtime.publications import (
    SUMMED_ENTITIES,
    find_start_offsets,
    read_newest_publications,
)
from relax_events.runtime.worker import Worker
from relax_events.staleness import is_external
from relax_events.topics import TopicPlan
from relax_events.topics.names import TRAIN_STEPS


@dataclass(slots=True)
class TrainingHistory:
    """Committed steps, ended prompt groups and published versions in log order, since the first
    publication that was read.

    `num_steps_before` and `ended_before` sum up the log before that publication.
    """

    steps: list[TrainStepCommitted] = field(default_factory=list)
    ended_group_ids: set[str] = field(default_factory=set)
    published: list[PolicyVersionPublished] = field(default_factory=list)
    checkpoint_positions: dict[tuple[str, int], int] = field(default_factory=dict)
    forgotten_step: int = -1
    num_steps_before: int = 0
    outcome_counts_before: Counter[str] = field(default_factory=Counter)
    _outcomes: Counter[str] = field(default_factory=Counter)

    @classmethod
    def read(cls, worker: Worker) -> TrainingHistory:
        """Read the control topics from the version of the newest checkpoint on; only committed
        records are read.

        Raises:
            BrokerUnavailable: A committed step can't be read. Training must not continue from an
                older one: samples would be trained twice.
        """
        reader = LogReader(worker.connection)
        try:
            published = _read_since_checkpoint(reader, worker)
            return cls._read(
                reader,
                worker,
                find_start_offsets(published, worker.plan),
                first=published[0] if published else None,
            )
        finally:
            reader.close()

    @classmethod
    def read_from(cls, worker: Worker, begins: Mapping[str, int]) -> TrainingHistory:
        """Read the control topics from these offsets on, by entity; raises as `read`."""
        reader = LogReader(worker.connection)
        try:
            return cls._read(reader, worker, begins, first=None)
        finally:
            reader.close()

    @classmethod
    def _read(
        cls,
        reader: LogReader,
        worker: Worker,
        begins: Mapping[str, int],
        *,
        first: PolicyVersionPublished | None,
    ) -> TrainingHistory:
        history = cls()
        if first is not None:
            history.num_steps_before, history.outcome_counts_before = (
                first.num_steps_before,
                Counter(first.outcome_counts_before),
            )
        starts = {
            (worker.plan.topic(entity), 0): begins.get(entity, 0) for entity in SUMMED_ENTITIES
        }
        records = reader.stream(
            {
                topic_partition: (start, reader.watermarks(*topic_partition)[1])
                for topic_partition, start in starts.items()
            }
        )
        events = (
            event for record in records if (event := worker.records.decode(record)) is not None
        )
        apply_events(events, history)
        history.require_no_gaps()
        return history

    def require_no_gaps(self) -> None:
        """Check that every published version has the step that made it; a transaction commits both.

        Raises:
            BrokerUnavailable: A step is missing: its record is damaged, or its transaction is just
                becoming visible.
        """
        committed = {step.policy_version for step in self.steps}
        if lost := [
            event.policy_version
            for event in self.published[1:]
            if event.policy_version not in committed
        ]:
            raise BrokerUnavailable(
                f"policy version {lost[0]} was published, but train step {lost[0] - 1} can't "
                "be read from control.train-steps; "
                "relax deadletter RUN_FILE --role trainer shows why; training is "
                "blocked until it can be read"
            )

    def apply(self, event: Event) -> None:
        """Apply an event of the control log."""
        if isinstance(event, TrainStepCommitted):
            self.steps.append(event)
        elif isinstance(event, PromptGroupEnded):
            self.ended_group_ids.add(event.prompt_group_id)
            self._outcomes[event.outcome.value] += not is_external(event.prompt_group_id)
        elif isinstance(event, PolicyVersionPublished):
            self.published.append(event)

    @property
    def policy_version(self) -> int:
        """The newest version whose step was committed; 0 before the first step."""
        return self.steps[-1].policy_version if self.steps else 0

    @property
    def is_fresh(self) -> bool:
        """Whether no version was published yet."""
        return not self.published

    @property
    def num_steps(self) -> int:
        """Number of train steps that the run has committed."""
        return self.num_steps_before + len(self.steps)

    @property
    def outcomes(self) -> Counter[str]:
        """Number of ended prompt groups by outcome, without external ones."""
        return self.outcome_counts_before + self._outcomes

    def checkpoints(self) -> list[CheckpointRef]:
        """Return the checkpoints that committed steps name, newest first."""
        return list(
            dict.fromkeys(
                step.checkpoint for step in reversed(self.steps) if step.checkpoint is not None
            )
        )

    def require_steps_from(self, first_version: int) -> None:
        """Check that training can restart at the run's first version: all steps since then were
        read.

        Raises:
            RunFailed: A step is missing and no checkpoint can be read; the text names the
                checkpoints.
        """
        if not self.is_fresh and self.published[0].policy_version != first_version:
            named = ", ".join(reference.uri for reference in self.checkpoints()) or "none"
            raise RunFailed(
                f"no checkpoint can be read (named by the log: {named}), and training can't "
                f"begin again at version {first_version}: the steps before "
                f"version {self.published[0].policy_version} can no longer be read; restore "
                "one of these objects, or start a run with a new run.id "
                "from the newest published weights"
            )

    def apply_checkpoint(self, extra: Mapping[str, Any]) -> None:
        """Take the offsets and the id window of a checkpoint: they hold even where the control log
        was truncated or is behind.
        """
        self.ended_group_ids |= set(extra["id_window"])
        self.checkpoint_positions = {
            (entity, partition): offset for entity, partition, offset in extra["consumed"]
        }
        self.forgotten_step = extra.get("forgotten_step", -1)

    def positions(self) -> dict[tuple[str, int], int]:
        """Return the next offset of the trainer's input, by entity and partition: everything below
        it was processed.
        """
        positions = dict(self.checkpoint_positions)
        for step in self.steps:
            advance_positions(positions, step.consumed)
        return positions


def advance_positions(
    positions: dict[tuple[str, int], int], consumed: Iterable[TopicOffset]
) -> None:
    """Move positions, by entity and partition, forward to the offsets that a step consumed. The log
    of an imported run still names the topics of the original run.
    """
    for at in consumed:
        topic_partition = (TopicPlan.parse_entity(at.topic), at.partition)
        positions[topic_partition] = max(at.offset, positions.get(topic_partition, 0))


def _read_since_checkpoint(reader: LogReader, worker: Worker) -> list[PolicyVersionPublished]:
    """Return the publications since the version of the oldest kept checkpoint; all of them where no
    checkpoint is named.

    A step names the newest checkpoint of its time. So the newest step leads to one checkpoint, and
    the first step that was trained after that checkpoint leads to the one before it.
    """
    published = read_newest_publications(
        reader, worker.plan, worker.records.decode, is_enough=lambda published: len(published) > 1
    )
    version = max(_checkpoint_versions_since(published, reader, worker), default=-1)
    for _ in range(worker.config.trainer.keep_checkpoints):
        published = _read_since_version(version, reader, worker)
        older = min(_checkpoint_versions_since(published, reader, worker), default=version)
        if older == version:
            break
        version = older
    return published


def _read_since_version(
    version: int, reader: LogReader, worker: Worker
) -> list[PolicyVersionPublished]:
    """Return the publications since that of a version."""
    published = read_newest_publications(
        reader,
        worker.plan,
        worker.records.decode,
        is_enough=lambda published: bool(published) and published[0].policy_version <= version,
    )
    return [event for event in published if event.policy_version >= version]


def _checkpoint_versions_since(
    published: Sequence[PolicyVersionPublished], reader: LogReader, worker: Worker
) -> set[int]:
    """Return the versions of the checkpoints that the steps since these publications name."""
    topic_partition = (worker.plan.topic(TRAIN_STEPS), 0)
    span = (
        find_start_offsets(published, worker.plan)[TRAIN_STEPS],
        reader.watermarks(*topic_partition)[1],
    )
    events = map(worker.records.decode, reader.stream({topic_partition: span}))
    return {
        event.checkpoint.policy_version
        for event in events
        if isinstance(event, TrainStepCommitted) and event.checkpoint is not None
    }
