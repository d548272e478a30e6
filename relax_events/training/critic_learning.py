"""How a critic learns: a second learner on the run's own log.

    control.train-steps ──▶ the batch of each committed step, from advantage.samples ──▶ returns =
    advantages + values ──▶ value loss, AdamW
                                                                                                            │
    control.metrics.critic ◀── metrics of the step             checkpoint in the object store, now
    and then ◀┘

Where `algorithm.critic_gae_lambda` or `length_adaptive_alpha` gives the critic another lambda than
the policy, the advantages that its returns are made of are computed anew, from the rewards,
log-probabilities and values of the recorded samples.

What it knows is a function of the log and of where it began, so nothing has to be committed: one
that starts anew loads its newest checkpoint and learns from the later steps again, with the same
bits on the CPU.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from types import TracebackType
from typing import Self

import structlog

from relax_events.deadline import Deadline
from relax_events.errors import (
    BrokerUnavailable,
    ObjectError,
    PoisonSample,
    RunFailed,
    StepNotFinite,
)
from relax_events.events.types import MetricsReported, TrainStepCommitted
from relax_events.kafka.log_reader import LogReader
from relax_events.objects import ObjectStore
from relax_events.runtime.control_follower import find_start_offsets, read_newest_publications
from relax_events.runtime.failpoints import failpoint
from relax_events.runtime.parent_run import SourceRun
from relax_events.runtime.worker import Worker
from relax_events.topics import TopicPlan
from relax_events.topics.plan import METRICS, TRAINING_SAMPLES
from relax_events.training.backend.protocol import Critic, ValueMetrics
from relax_events.training.batch.packing import micro_batch_slices
from relax_events.training.batch.token_sequence import read_array
from relax_events.training.checkpoint.checkpoints import Checkpoints
from relax_events.training.checkpoint.critic_checkpoints import (
    FOLDER,
    list_critic_checkpoints,
    stored_checkpoint_versions,
)
from relax_events.training.checkpoint.pending import PendingCheckpoint
from relax_events.training.ranks import SingleRank
from relax_events.training.replay.parent_steps import ReplaySource
from relax_events.training.replay.recorded_batches import RecordedBatch, RecordedBatches
from relax_events.training.replay.relabel import AdvantageRelabeller

log = structlog.get_logger()
POLL_SECONDS = 0.5
STEP_SECONDS = 30.0
"""A published version's step, which was committed with it, is readable well before this."""
REMEDY = (
    "the critic has to learn from them: keep more with run.retain_versions, or train on as a fork"
)


class CriticLearner:
    """See the module's docstring. Use it as a context manager."""

    def __init__(self, worker: Worker, critic: Critic, store: ObjectStore) -> None:
        """Go on from the newest checkpoint, and learn from every step that is committed by now,
        unless the drain comes first.

        Raises:
            ConfigError: Records of a step are gone.
            RunFailed: A step can't be learned from.
        """
        self._worker, self._critic = worker, critic
        critic.on_progress(worker.lifecycle.record_progress)
        self._checkpoints = Checkpoints(
            store, ranks=SingleRank(), keep=worker.config.trainer.keep_checkpoints, folder=FOLDER
        )
        self._pending: PendingCheckpoint | None = None
        self._checkpoint_begun = time.monotonic()
        self._consumed: dict[int, int] = {}
        self._consecutive_skips = 0
        begin = self._find_start_offset(store)
        digests = self._recorded_digests(begin)
        self._restore(store, digests)
        own = SourceRun(worker.config, worker.plan, worker.connection)
        first, last = critic.policy_version, worker.config.last_version
        own_returns = worker.config.algorithm.of_critic
        judge = (
            None
            if own_returns is None
            else AdvantageRelabeller(
                own_returns, max_new_tokens=worker.config.engine.sampling.max_new_tokens
            )
        )
        batches = RecordedBatches(worker, SingleRank(), judge=judge)
        begin = begin if first in digests else 0
        self._steps = ReplaySource(
            own,
            batches,
            first=first,
            last=last,
            begin=begin,
            decode=lambda record: worker.records.codec.decode(record.value),
            remedy=REMEDY,
        )
        self._learn_until(max(digests, default=first), or_drain=True)

    def learn_up_to(self, policy_version: int) -> int:
        """Learn from every step that led to a policy version, and return the version that the
        critic has come to: this one, or a newer.

        Raises:
            BrokerUnavailable: A step of a version that is published can't be read.
        """
        self._learn_until(policy_version, or_drain=False)
        return self._critic.policy_version

    def step_if_ready(self) -> None:
        """Learn from the next step if it is there."""
        if self._steps.has_next(timeout_seconds=0.0):
            self._learn(self._take())
        self._poll_checkpoint()

    def _find_start_offset(self, store: ObjectStore) -> int:
        """Return where the steps since the oldest stored checkpoint begin on control.train-steps;
        where there is none all have to be learned.
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
            found = read_newest_publications(
                reader,
                plan,
                decode,
                is_enough=lambda found: bool(found) and found[0].policy_version <= oldest,
            )
        finally:
            reader.close()
        return find_start_offsets(
            [event for event in found if event.policy_version >= oldest], plan
        )["control.train-steps"]

    def _recorded_digests(self, begin: int) -> dict[int, bytes]:
        place, digests = (self._worker.plan.topic("control.train-steps"), 0), {}
        reader = LogReader(self._worker.connection)
        try:
            for record in reader.stream({place: (begin, reader.watermarks(*place)[1])}):
                step = self._worker.records.decode(record)
                if isinstance(step, TrainStepCommitted):
                    digests[step.policy_version] = step.weights_digest
        finally:
            reader.close()
        return digests

    def _restore(self, store: ObjectStore, digests: Mapping[int, bytes]) -> None:
        for found in list_critic_checkpoints(store, digests=digests):
            try:
                self._critic.load_state(self._checkpoints.load(found.reference).state)
            except ObjectError as error:
                log.warning("critic_checkpoint.rejected", uri=found.reference.uri, error=str(error))
                continue
            self._consumed = dict(found.consumed)
            log.info("checkpoint.loaded", policy_version=self._critic.policy_version)
            return

    def _learn_until(self, policy_version: int, *, or_drain: bool) -> None:
        deadline = Deadline(STEP_SECONDS)
        while self._critic.policy_version < policy_version and not (
            or_drain and self._worker.drain.requested
        ):
            if self._steps.has_next(timeout_seconds=POLL_SECONDS):
                self._learn(self._take())
                deadline = Deadline(STEP_SECONDS)
            elif deadline.passed:
                missing = (
                    f"train step {self._critic.policy_version}, which led to policy version "
                    f"{policy_version},"
                )
                raise BrokerUnavailable(
                    f"{missing} can't be read from control.train-steps after "
                    f"{STEP_SECONDS:g} s; is the broker down?"
                )
            self._worker.lifecycle.tick(working=True)

    def _take(self) -> RecordedBatch:
        with self._worker.lifecycle.piece("read a recorded batch"):
            return self._steps.take()

    def _learn(self, batch: RecordedBatch) -> None:
        """Train on a step's samples, in recorded order and cut by our own budget, so that the
        result is the same each time.
        """
        started, samples = time.monotonic(), [placed.sample for placed in batch.samples]
        lengths = [len(read_array(sample, "tokens")) for sample in samples]
        try:
            for part in micro_batch_slices(
                lengths, max_tokens=self._worker.config.trainer.max_tokens_per_micro_batch
            ):
                with self._worker.lifecycle.piece("train a micro-batch"):
                    self._critic.accumulate(samples[part])
                self._worker.lifecycle.tick(working=True)
        except PoisonSample as error:
            raise RunFailed(
                f"the critic can't learn from train step {batch.step.train_step}: {error}; "
                "was it made under another run file?"
            ) from error
        metrics = self._update()
        failpoint("critic.learning")
        for at in (
            at for at in batch.step.consumed if TopicPlan.parse_entity(at.topic) == TRAINING_SAMPLES
        ):
            self._consumed[at.partition] = max(at.offset, self._consumed.get(at.partition, 0))
        if metrics is not None:
            self._report(metrics)
        self._save_checkpoint(batch.step)
        self._worker.metrics.tokens(sum(lengths))
        self._worker.lifecycle.record_processed(len(samples), started)

    def _update(self) -> ValueMetrics | None:
        """Update the critic and return its metrics; None where loss or gradient is not finite and
        the update is skipped.

        Raises:
            StepNotFinite: This happened `trainer.max_steps_not_finite` times in a row.
        """
        with self._worker.lifecycle.piece("step the optimizer"):
            try:
                metrics = self._critic.step()
            except StepNotFinite as error:
                self._consecutive_skips += 1
                log.error(
                    "critic_update.skipped", num_in_a_row=self._consecutive_skips, error=str(error)
                )
                if self._consecutive_skips >= self._worker.config.trainer.max_steps_not_finite:
                    raise
                self._critic.skip_step()
                return None
        self._consecutive_skips = 0
        return metrics

    def _report(self, metrics: ValueMetrics) -> None:
        worker, version = self._worker, self._critic.policy_version
        lag = max(worker.control.policy_version - version, 0)
        worker.heartbeat.set_policy_version(version)
        worker.metrics.learned(
            value_loss=metrics.value_loss,
            explained_variance=metrics.explained_variance,
            version_lag=lag,
        )
        values = {**asdict(metrics), "critic_version_lag": float(lag)}
        event = MetricsReported(
            worker_id=worker.worker_id, role=worker.role, policy_version=version, values=values
        )
        worker.records.producer.send(
            worker.records.build(METRICS[worker.role], event, key=worker.worker_id)
        )
        log.info(
            "critic_step.learned",
            train_step=version - 1,
            **{name: round(value, 6) for name, value in values.items()},
        )

    def _save_checkpoint(self, step: TrainStepCommitted) -> None:
        """Start a checkpoint when one is due. It becomes real with its manifest, once all of it is
        in the store.

        None begins amid skipped updates, so that a critic that starts anew counts all of them
        again.
        """
        self._poll_checkpoint()
        seconds = time.monotonic() - self._checkpoint_begun
        is_due = (
            self._worker.config.trainer.checkpoint_is_due(step.policy_version, seconds=seconds)
            and not self._consecutive_skips
        )
        if not is_due or self._pending is not None:
            return
        self._checkpoint_begun = time.monotonic()
        extra = {
            "weights_digest": step.weights_digest.hex(),
            "consumed": sorted(self._consumed.items()),
        }
        with self._worker.lifecycle.transfer("copy the checkpoint"):
            self._pending = self._checkpoints.save(self._critic.state(), extra=extra)

    def _poll_checkpoint(self) -> None:
        if self._pending is not None and (reference := self._pending.poll()) is not None:
            self._pending = None
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
        self._checkpoints.close()
        self._steps.close()
