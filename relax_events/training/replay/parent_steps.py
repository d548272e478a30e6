"""Reads the committed steps of the parent run with their samples, waits for new ones, and fills
train batches from them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import structlog

from relax_events.config import AlgorithmConfig, RunConfig
from relax_events.errors import (
    BrokerError,
    BrokerUnavailable,
    ConfigError,
    CorruptRecord,
    OutOfMemory,
    PoisonSample,
    SchemaError,
)
from relax_events.events.codec import UnknownFingerprint
from relax_events.events.generations import TrajectoryKey
from relax_events.events.sample_columns import split_samples
from relax_events.events.types import Event, TrainStepCommitted
from relax_events.kafka.log_reader import LogReader
from relax_events.kafka.records import Record
from relax_events.objects import ObjectStore
from relax_events.objects.claim_check import check_out
from relax_events.runtime.run_description import ParentRun
from relax_events.runtime.worker import Worker
from relax_events.topics.names import TRAIN_STEPS
from relax_events.training.batch.batch_opener import BatchOpener
from relax_events.training.batch.live_batches import IDLE_SECONDS, ROUND_SECONDS
from relax_events.training.batch.lockstep_batch import UndecodedSample
from relax_events.training.batch.sample_intake import SampleIntake
from relax_events.training.ranks import Ranks
from relax_events.training.replay.recorded_batches import (
    MAX_STEPS_AT_ONCE,
    Decode,
    RecordedBatch,
    RecordedBatches,
)
from relax_events.training.replay.relabel import (
    AdvantageRelabeller,
    RelabelledReward,
    needs_new_advantages,
    read_rewards,
    require_recorded_teacher,
)
from relax_events.training.step_commits import StepCommits
from relax_events.training.step_record import RankStepResult

log = structlog.get_logger()


class ParentDecoder:
    """Decodes the parent run's records, and fetches arrays from its store."""

    def __init__(self, source: ParentRun) -> None:
        self._source, self._codec = source, source.codec()
        self._store = ObjectStore.open(
            source.objects_uri, uri_aliases=source.config.objects.uri_aliases
        )

    def decode(self, record: Record) -> Event:
        """Return a record's event; for an unknown schema, read the parent's schemas again once."""
        try:
            return self._codec.decode(record.value)
        except UnknownFingerprint:
            self._codec = self._source.codec()
        return self._codec.decode(record.value)

    def decode_samples(self, record: Record) -> list[Event]:
        """Return the event of each sample, with its stored arrays fetched."""
        return [check_out(event, self._store) for event in split_samples(self.decode(record))]


def open_recorded_batches(worker: Worker, source: ParentRun, ranks: Ranks) -> RecordedBatches:
    """Return the batches of a replay: as recorded, or relabelled if the run file requires it.

    Raises:
        ConfigError: The named scores or the teacher's log-probabilities are missing, or the
            algorithm can't learn from the recorded samples.
    """
    config = worker.config
    recorded, parent_id = source.config.algorithm, source.config.run.id
    require_compatible_algorithm(recorded, config.algorithm, run_id=parent_id)
    require_recorded_teacher(recorded, config.algorithm, run_id=parent_id)
    relabel, max_new_tokens = None, config.engine.sampling.max_new_tokens
    if config.parent.scores:
        relabel = AdvantageRelabeller(
            config.algorithm,
            max_new_tokens=max_new_tokens,
            rewards=_read_rescored_rewards(worker, source),
            scores=config.parent.scores,
        )
    elif needs_new_advantages(recorded, config.algorithm):
        relabel = AdvantageRelabeller(config.algorithm, max_new_tokens=max_new_tokens)
    return RecordedBatches(
        worker, ranks, decode=ParentDecoder(source).decode_samples, relabel=relabel
    )


def require_compatible_algorithm(
    recorded: AlgorithmConfig, algorithm: AlgorithmConfig, *, run_id: str
) -> None:
    """Reject a replay by an algorithm that learns from other data than the parent recorded;
    generated samples may be used as SFT targets.

    Args:
        recorded: The parent run's algorithm.
        algorithm: The algorithm of the replay.
        run_id: The parent run, for the error.
    Raises:
        ConfigError: The text names both.
    """
    if recorded.is_unread:
        return
    if (recorded.learns_from, algorithm.learns_from) != (
        "rewards",
        "answers",
    ) and recorded.learns_from != algorithm.learns_from:
        raise ConfigError(
            f"the rollouts can't be replayed: algorithm {algorithm.name} learns from "
            f"{algorithm.learns_from}, and run {run_id} recorded {recorded.learns_from}; set "
            f"algorithm.name to {recorded.name}"
        )


def _read_rescored_rewards(
    worker: Worker, source: ParentRun
) -> dict[TrajectoryKey, RelabelledReward]:
    scores, run_id = worker.config.parent.scores, source.config.run.id
    topic = worker.plan.topic(f"reward.scores.{scores}")
    reader = LogReader(worker.connection)
    try:
        return read_rewards(
            reader, topic, num_partitions=source.plan.num_sample_partitions, codec=source.codec()
        )
    except BrokerUnavailable:
        raise
    except BrokerError as error:
        raise ConfigError(
            f"parent.scores = {scores!r}: run {run_id} has no such scores ({error}); make "
            "them with relax rewards --keep"
        ) from error
    finally:
        reader.close()


class ReplaySource:
    """Yields the steps of a run in order, and reads ahead where more are committed.

    Each rank has its own. One rank may see a step before another does, so the ranks have to agree.
    """

    def __init__(
        self,
        source: ParentRun,
        batches: RecordedBatches,
        *,
        first: int,
        last: int,
        begin: int = 0,
        decode: Decode | None = None,
        remedy: str = "set parent.from_version",
    ) -> None:
        """Start reading.

        Args:
            source: Whose steps they are.
            batches: Reads their samples.
            first: The train step to begin with.
            last: Steps from here on are left out.
            begin: An offset of control.train-steps at or before the first step's.
            decode: Turns a record of the control log into its event; by default with the
                parent's schemas.
            remedy: Error text for a step whose records were deleted.
        """
        self._remedy = remedy
        self._run_id, self._batches = source.config.run.id, batches
        self._next, self._last = first, last
        self._decode: Decode = decode or ParentDecoder(source).decode
        self._control = LogReader(
            source.connection, start={(source.plan.topic(TRAIN_STEPS), 0): begin}
        )
        self._samples = LogReader(source.connection)
        self._steps: deque[TrainStepCommitted] = deque()
        self._batches_of: Iterator[RecordedBatch] = iter(())
        self._num_opened = 0

    def has_next(self, *, timeout_seconds: float) -> bool:
        """Wait for the next step; return whether there is one.

        Raises:
            ConfigError: The source's control log has a gap.
        """
        if not self._num_opened and not self._steps:
            for record in self._control.fetch(MAX_STEPS_AT_ONCE, timeout_seconds=timeout_seconds):
                self._add_step(record)
        return bool(self._num_opened or self._steps)

    def take(self) -> RecordedBatch:
        """Return this rank's part of the next step, which must be available.

        Raises:
            ConfigError: Its records were purged; the text names the first one.
            RunFailed: A record is not what was trained.
        """
        if not self._num_opened:
            steps = list(self._steps)
            self._batches_of, self._num_opened = (
                self._batches.read(self._samples, steps),
                len(steps),
            )
            self._steps.clear()
        first = self._next - len(self._steps) - self._num_opened
        try:
            batch = next(self._batches_of)
        except BrokerUnavailable:
            raise
        except BrokerError as error:
            raise ConfigError(
                f"steps from {first} of run {self._run_id} can't be trained again: {error}; relax "
                f"runs show {self._run_id} shows which steps are left; {self._remedy}"
            ) from error
        self._num_opened -= 1
        return batch

    def _add_step(self, record: Record) -> None:
        try:
            step = self._decode(record)
        except (CorruptRecord, SchemaError) as error:
            log.warning(
                "record.decode_failed", location=record.location, error=str(error)
            )  # where it was a step, the next one shows the gap
            return
        if (
            not isinstance(step, TrainStepCommitted)
            or not self._next <= step.train_step < self._last
        ):
            return
        if step.train_step != self._next:
            raise ConfigError(
                f"run {self._run_id} has step {step.train_step} where {self._next} should "
                "be; its control log has a gap"
            )
        self._steps.append(step)
        self._next += 1

    def close(self) -> None:
        """Close the readers."""
        self._control.close()
        self._samples.close()


class RecordedTraining:
    """Gives each train step the batch that the parent trained in it; `current` is the last one."""

    def __init__(
        self,
        worker: Worker,
        source: ReplaySource,
        opener: BatchOpener,
        *,
        intake: SampleIntake,
        commits: StepCommits,
    ) -> None:
        self._worker, self._source, self._opener = worker, source, opener
        self._ranks: Ranks = opener.ranks
        self._config: RunConfig = worker.config
        self._intake, self._commits = intake, commits
        self.current: RecordedBatch | None = None

    def close(self) -> None:
        """Close the source."""
        self._source.close()

    def fill(self, version: int) -> RankStepResult | None:
        """Train the samples of the parent's next step in the parent's order, as the step at a
        version; return this rank's part, None when the drain came first.
        """
        while not self._commits.agree_to_drain():
            if self._agree_on_next():
                break
            self._worker.lifecycle.tick(working=False)
        else:
            return None
        with (
            self._commits.phases.measure("decode"),
            self._worker.lifecycle.piece("read a recorded batch"),
        ):
            step = self.current = self._source.take()
        try:
            for item in step.samples:
                self._intake.require_trainable(item.sample)
            train = self._train_in_rounds if self._opener.is_in_rounds else self._train_streamed
            share = train(step, version)
        except (PoisonSample, OutOfMemory) as error:
            raise ConfigError(
                f"the rollouts of run {self._config.parent.run} can't be trained with these "
                f"settings: {error}"
            ) from error
        self._worker.lifecycle.tick(working=True)
        return share

    def _train_streamed(self, step: RecordedBatch, version: int) -> RankStepResult:
        """Train the parent's micro-batches, which it may have closed before they were full; they
        are divided further where the budget is smaller now.
        """
        batch = self._opener.streamed(version, max_cells=step.step.max_cells)
        for part in step.parts():
            batch.feed(part)
            batch.flush()
        for refused in batch.pop_untrainable():
            raise refused.error
        return batch.share

    def _train_in_rounds(self, step: RecordedBatch, version: int) -> RankStepResult:
        samples = step.samples
        batch = self._opener.in_rounds(version, max_cells=step.step.max_cells)
        batcher = self._opener.micro_batcher()
        located = {item.sample.sample_id: item for item in samples}
        closed = [*batcher.feed(item.sample for item in samples), batcher.flush() or []]
        micro_batches = [
            [UndecodedSample.of(located[sample.sample_id]) for sample in micro_batch]
            for micro_batch in closed
            if micro_batch
        ]
        for refused in batch.train(micro_batches):
            raise PoisonSample(refused.error)
        if self._ranks.at.is_data_leader:  # of several ranks with a part of it, one names it
            batch.share.prompt_group_ids += [
                item.sample.prompt_group_id for item in samples if not item.sample.key.sample_index
            ]
        return batch.share

    def _agree_on_next(self) -> bool:
        """Return whether every rank sees the parent's next step; all ranks get the same answer."""
        with self._commits.phases.measure("wait"):
            mine = self._source.has_next(
                timeout_seconds=IDLE_SECONDS if self._ranks.size == 1 else ROUND_SECONDS
            )
        return all(flag == b"1" for flag in self._ranks.all_gather_bytes(b"1" if mine else b"0"))
