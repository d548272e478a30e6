"""Trains the critic: a second learner that follows the run's own log.

    control.train-steps ──▶ the batch of each committed step, from advantage.samples
                        ──▶ returns = advantages + values ──▶ value loss, AdamW
                        ──▶ metrics of the step to control.metrics.critic, periodic checkpoints to
                        the object store

If `algorithm.critic_gae_lambda` or `length_adaptive_alpha` gives the critic another lambda than the
policy, the advantages in its returns are recomputed from the rewards, log-probabilities and values
of the recorded samples.

The critic's state is a function of the log and its start, so it commits nothing. A restarted critic
loads its newest checkpoint and learns from the later steps again, bit for bit the same on the CPU.

A step that runs out of memory is learned again in smaller passes, as the trainer trains it. The
policy has trained it, so a prompt group with a path that does not fit alone can't end any more: the
critic leaves it out, and reports it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from types import TracebackType
from typing import Self

import structlog

from relax_events.config import RunConfig
from relax_events.deadline import Deadline
from relax_events.errors import (
    BrokerUnavailable,
    OutOfMemory,
    RunFailed,
    StepNotFinite,
)
from relax_events.events.types import MetricsReported, SampleReady, TrainStepCommitted
from relax_events.kafka.log_reader import LogReader
from relax_events.objects import ObjectStore
from relax_events.runtime.failpoints import failpoint
from relax_events.runtime.publications import find_start_offsets, read_newest_publications
from relax_events.runtime.run_description import ParentRun
from relax_events.runtime.worker import Worker
from relax_events.topics import TopicPlan
from relax_events.topics.names import METRICS, TRAIN_STEPS, TRAINING_SAMPLES
from relax_events.training.backend.protocol import Critic, ValueMetrics
from relax_events.training.batch.batch_opener import BatchOpener
from relax_events.training.batch.paths import longest_path
from relax_events.training.batch.row_layout import read_array
from relax_events.training.checkpoint.checkpoints import Checkpoints
from relax_events.training.checkpoint.critic_checkpoints import (
    FOLDER,
    list_critic_checkpoints,
    stored_checkpoint_versions,
)
from relax_events.training.critic_ranks import CriticBounds, LeadingCritic
from relax_events.training.ranks import Ranks, SingleRank
from relax_events.training.replay.parent_steps import ReplaySource
from relax_events.training.replay.recorded_batches import RecordedBatch, RecordedBatches
from relax_events.training.replay.relabel import AdvantageRelabeller
from relax_events.training.smaller_steps import SmallerSteps

log = structlog.get_logger()
POLL_SECONDS = 0.5
STEP_SECONDS = 30.0
"""Deadline for reading the step of a published version, which was committed with it."""
REMEDY = (
    "the critic has to learn from them: keep more with run.retain_versions, or continue as a fork"
)


def open_critic_checkpoints(config: RunConfig, store: ObjectStore, ranks: Ranks) -> Checkpoints:
    """Open the checkpoints of a critic, on each rank that holds it."""
    keep = config.trainer.keep_checkpoints
    return Checkpoints(store, ranks=ranks, keep=keep, folder=FOLDER)


def read_bounds(store: ObjectStore, ranks: Ranks) -> CriticBounds:
    """Read where a critic ran out of memory; collective, on each rank that holds it."""
    bounds = CriticBounds(
        steps=SmallerSteps(store, ranks, folder=FOLDER),
        values=SmallerSteps(store, ranks, folder=FOLDER, name="values-out-of-memory"),
    )
    for one in bounds:
        one.read(0)
    return bounds


class CriticLearner:
    """See the module's docstring. Use it as a context manager.

    `critic` leads all ranks that hold it: ask it for values.
    """

    def __init__(
        self, worker: Worker, critic: Critic, store: ObjectStore, *, ranks: Ranks | None = None
    ) -> None:
        """Resume from the newest checkpoint, and learn from every committed step, unless a drain is
        requested first.

        Args:
            worker: Of rank 0.
            critic: Rank 0's part.
            store: The run's.
            ranks: Those that hold the critic; the others are in `follow_leader`. By default this
                process alone.
        Raises:
            ConfigError: Records of a step were deleted.
            RunFailed: A step can't be learned from.
        """
        self._worker, ranks = worker, ranks or SingleRank()
        self._checkpoints = open_critic_checkpoints(worker.config, store, ranks)
        bounds = read_bounds(store, ranks)
        self._smaller = bounds.steps
        self.critic = LeadingCritic(
            critic,
            self._checkpoints,
            ranks=ranks,
            bounds=bounds,
            timeout_seconds=worker.config.trainer.collective_timeout_seconds,
        )
        self.critic.on_progress(worker.lifecycle.record_progress)
        self._opener = BatchOpener(
            worker.config,
            SingleRank(),  # rank 0 alone reads the log
            self._accumulate,
            self.critic.discard,
            self.critic.set_max_cells,
            self._smaller,
            role="critic",
        )
        self._checkpoint_begun = time.monotonic()
        self._consumed: dict[int, int] = {}
        self._consecutive_skips = 0
        begin = self._find_start_offset(store)
        digests = self._recorded_digests(begin)
        self._restore(store, digests)
        source = ParentRun(worker.config, worker.plan, worker.connection)
        first, last = self.critic.policy_version, worker.config.last_version
        critic_algorithm = worker.config.algorithm.of_critic
        relabeller = (
            None
            if critic_algorithm is None
            else AdvantageRelabeller(
                critic_algorithm, max_new_tokens=worker.config.engine.sampling.max_new_tokens
            )
        )
        batches = RecordedBatches(worker, SingleRank(), relabel=relabeller)
        begin = begin if first in digests else 0
        self._steps = ReplaySource(
            source,
            batches,
            first=first,
            last=last,
            begin=begin,
            decode=lambda record: worker.records.codec.decode(record.value),
            remedy=REMEDY,
        )
        self._learn_until(max(digests, default=first), or_drain=True)

    def learn_up_to(self, policy_version: int) -> int:
        """Learn from every step up to a policy version; return the critic's version, which is this
        one or a newer one.

        Raises:
            BrokerUnavailable: A step of a version that is published can't be read.
        """
        self._learn_until(policy_version, or_drain=False)
        return self.critic.policy_version

    def step_if_ready(self) -> None:
        """Learn from the next step if it is committed."""
        if self._steps.has_next(timeout_seconds=0.0):
            self._learn(self._take())
        self._poll_checkpoint()
        self.critic.stay_in_touch()

    def _find_start_offset(self, store: ObjectStore) -> int:
        """Return where the steps since the oldest stored checkpoint begin on control.train-steps;
        0 if no checkpoint is stored.
        """
        oldest = min(stored_checkpoint_versions(store), default=-1)
        if oldest < 0:
            return 0
        reader, plan, decode = (
            LogReader(self._worker.connection),
            self._worker.plan,
            self._worker.records.decode,
        )
        try:
            publications = read_newest_publications(
                reader,
                plan,
                decode,
                is_enough=lambda events: bool(events) and events[0].policy_version <= oldest,
            )
        finally:
            reader.close()
        return find_start_offsets(
            [event for event in publications if event.policy_version >= oldest], plan
        )[TRAIN_STEPS]

    def _recorded_digests(self, begin: int) -> dict[int, bytes]:
        topic_partition, digests = (self._worker.plan.topic(TRAIN_STEPS), 0), {}
        reader = LogReader(self._worker.connection)
        try:
            for record in reader.stream(
                {topic_partition: (begin, reader.watermarks(*topic_partition)[1])}
            ):
                step = self._worker.records.decode(record)
                if isinstance(step, TrainStepCommitted):
                    digests[step.policy_version] = step.weights_digest
        finally:
            reader.close()
        return digests

    def _restore(self, store: ObjectStore, digests: Mapping[int, bytes]) -> None:
        for checkpoint in list_critic_checkpoints(store, digests=digests):
            if not self.critic.load(checkpoint.reference):
                continue
            self._consumed = dict(checkpoint.consumed)
            log.info("checkpoint.loaded", policy_version=self.critic.policy_version)
            return

    def _learn_until(self, policy_version: int, *, or_drain: bool) -> None:
        deadline = Deadline(STEP_SECONDS)
        while self.critic.policy_version < policy_version and not (
            or_drain and self._worker.drain.requested
        ):
            if self._steps.has_next(timeout_seconds=POLL_SECONDS):
                self._learn(self._take())
                deadline = Deadline(STEP_SECONDS)
            elif deadline.passed:
                raise BrokerUnavailable(
                    f"train step {self.critic.policy_version}, which led to policy version "
                    f"{policy_version}, can't be read from control.train-steps after "
                    f"{STEP_SECONDS:g} s; is the broker down?"
                )
            self._worker.lifecycle.tick(working=True)

    def _take(self) -> RecordedBatch:
        with self._worker.lifecycle.piece("read a recorded batch"):
            return self._steps.take()

    def _learn(self, batch: RecordedBatch) -> None:
        """Train on a step's samples, in recorded order and split by the critic's budget, so that
        the result is deterministic.
        """
        started = time.monotonic()
        too_large = self._train(batch)
        samples = [
            placed.sample
            for placed in batch.samples
            if placed.sample.prompt_group_id not in too_large
        ]
        metrics = None
        if samples:
            metrics = self._update()
        else:
            self.critic.skip_step()
        failpoint("critic.learning")
        for at in (
            at for at in batch.step.consumed if TopicPlan.parse_entity(at.topic) == TRAINING_SAMPLES
        ):
            self._consumed[at.partition] = max(at.offset, self._consumed.get(at.partition, 0))
        self._report(metrics, num_too_large=len(too_large))
        self._save_checkpoint(batch.step)
        self._worker.metrics.count_tokens(
            sum(len(read_array(sample, "tokens")) for sample in samples)
        )
        self._worker.lifecycle.record_processed(len(samples), started)

    def _train(self, batch: RecordedBatch) -> set[str]:
        """Train on a step's samples up to its update; return the prompt groups that are left out
        because a path of theirs does not fit the device alone.

        Raises:
            RunFailed: A sample can't be learned from.
        """
        version = self.critic.policy_version
        bounds, trained = self._smaller.bounds(version), self._opener.streamed(version)
        too_large: dict[str, str] = {}
        for placed in batch.samples:
            if problem := bounds.describe_too_long(longest_path(placed.sample)):
                too_large.setdefault(placed.sample.prompt_group_id, problem)
        trained.feed([one for one in batch.samples if one.sample.prompt_group_id not in too_large])
        trained.flush()
        for refused in trained.pop_untrainable():
            if not isinstance(refused.error, OutOfMemory):
                raise RunFailed(
                    f"the critic can't learn from train step {batch.step.train_step}: "
                    f"{refused.error}; was it made under another run file?"
                ) from refused.error
            too_large[refused.prompt_group_id] = str(refused.error)
        for group_id, problem in too_large.items():
            log.error("critic_step.group_left_out", prompt_group_id=group_id, error=problem)
        return set(too_large)

    def _accumulate(self, samples: Sequence[SampleReady]) -> None:
        with self._worker.lifecycle.piece("train a micro-batch"):
            self.critic.accumulate(samples)
        self._worker.lifecycle.tick(working=True)

    def _update(self) -> ValueMetrics | None:
        """Update the critic and return its metrics; None where loss or gradient is not finite and
        the update is skipped.

        Raises:
            StepNotFinite: This happened `trainer.max_steps_not_finite` times in a row.
        """
        with self._worker.lifecycle.piece("step the optimizer"):
            try:
                metrics = self.critic.step()
            except StepNotFinite as error:
                self._consecutive_skips += 1
                log.error(
                    "critic_update.skipped", num_in_a_row=self._consecutive_skips, error=str(error)
                )
                if self._consecutive_skips >= self._worker.config.trainer.max_steps_not_finite:
                    raise
                self.critic.skip_step()
                return None
        self._consecutive_skips = 0
        return metrics

    def _report(self, metrics: ValueMetrics | None, *, num_too_large: int) -> None:
        """Report a step; without `metrics`, the prompt groups that were left out alone."""
        if metrics is None and not num_too_large:
            return
        worker, version = self._worker, self.critic.policy_version
        lag = max(worker.control.policy_version - version, 0)
        worker.heartbeat.set_policy_version(version)
        values = {"critic_prompt_groups_too_large": float(num_too_large)}
        if metrics is not None:
            worker.metrics.critic.set(
                value_loss=metrics.value_loss,
                explained_variance=metrics.explained_variance,
                version_lag=lag,
            )
            values |= {**asdict(metrics), "critic_version_lag": float(lag)}
            log.info(
                "critic_step.learned",
                train_step=version - 1,
                **{name: round(value, 6) for name, value in values.items()},
            )
        event = MetricsReported(
            worker_id=worker.worker_id, role=worker.role, policy_version=version, values=values
        )
        worker.records.producer.send(
            worker.records.build(METRICS[worker.role], event, key=worker.worker_id)
        )

    def _save_checkpoint(self, step: TrainStepCommitted) -> None:
        """Start a checkpoint when one is due. It becomes valid with its manifest, once all shards
        are stored.

        None starts during consecutive skipped updates, so that a restarted critic counts all of
        them again.
        """
        self._poll_checkpoint()
        seconds = time.monotonic() - self._checkpoint_begun
        is_due = (
            self._worker.config.trainer.checkpoint_is_due(step.policy_version, seconds=seconds)
            and not self._consecutive_skips
        )
        if not is_due or self.critic.is_saving:
            return
        self._checkpoint_begun = time.monotonic()
        extra = {
            "weights_digest": step.weights_digest.hex(),
            "consumed": sorted(self._consumed.items()),
        }
        with self._worker.lifecycle.transfer("copy the checkpoint"):
            self.critic.save(extra)

    def _poll_checkpoint(self) -> None:
        if (reference := self.critic.poll_checkpoint()) is not None:
            self._checkpoints.prune(reference)
            log.info("checkpoint.written", policy_version=reference.policy_version)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:  # otherwise they notice that this rank has died
            self.critic.end()
        self._checkpoints.close()
        self._steps.close()
