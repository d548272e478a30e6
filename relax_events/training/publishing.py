"""Publishes and commits trained steps, and prunes weights and checkpoints. Rank 0 only.

    trained --> weights to the store, and to engines --> one transaction: step, outcomes, version,
    offsets --> delete weights that are no longer needed

With `weights.async_publish` the weights are written while the next step is trained, and the step's
record waits for them: the trainer is one step ahead of the log. A crash in between loses that
step's training only: it was never on the log.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import structlog

from relax_events.events.parts import CheckpointRef, ObjectRef
from relax_events.events.types import PolicyVersionPublished, PromptGroupEnded, TrainStepCommitted
from relax_events.kafka.log_reader import LogReader
from relax_events.objects import ObjectStore
from relax_events.projections.training_history import TrainingHistory
from relax_events.runtime.failpoints import failpoint
from relax_events.runtime.worker import Worker
from relax_events.telemetry.traces import TracedWork
from relax_events.training.checkpoint.checkpoints import Checkpoints
from relax_events.training.commit import StepCommitter
from relax_events.training.step_record import RankStepResult
from relax_events.weights.artifact_writer import delete_weights, stored_versions
from relax_events.weights.factory import open_weights_publisher
from relax_events.weights.file_content import FileContent, lay_out
from relax_events.weights.retention import (
    BestVersions,
    deletable_versions,
    num_newest,
    reference_versions,
)
from relax_events.weights.reused_memory import ReusedMemory

if TYPE_CHECKING:
    from torch import Tensor

log = structlog.get_logger()
WeightPart = Mapping[str, "Tensor"]
"""Some tensors of a version, by Hugging Face name, on any device."""


@dataclass(frozen=True, slots=True)
class TrainedStep:
    """A trained step that is not committed yet."""

    train_step: int
    results: Sequence[RankStepResult]
    metrics: Mapping[str, float] | None
    """None where the update was skipped or held."""
    phase_seconds: Mapping[str, float]
    checkpoint: CheckpointRef | None
    began_ns: int
    """Start of the step, in nanoseconds since the epoch."""
    is_held: bool = False
    """Whether only the critic learned."""


class StepPublisher:
    """See the module's docstring. Used by the trainer's thread."""

    def __init__(
        self, worker: Worker, reader: LogReader, *, store: ObjectStore, checkpoints: Checkpoints
    ) -> None:
        """Fence every earlier trainer of the run."""
        self._worker, self._store, self._checkpoints = worker, store, checkpoints
        self._committer = StepCommitter(worker, reader)
        self._transport = open_weights_publisher(worker, store)
        self._memory = ReusedMemory()
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weights-writer")
        self._written: Future[tuple[ObjectRef, bytes]] = Future()
        self._trained: TrainedStep | None = None
        self._pruned_to: CheckpointRef | None = None
        self.best = BestVersions(worker.config.weights.keep_best)
        for event in worker.control.follower.history:
            self.best.apply(event)
        self._write_began_ns = 0

    @property
    def has_uncommitted_step(self) -> bool:
        """Whether a trained step is not committed."""
        return self._trained is not None

    @property
    def weights_are_written(self) -> bool:
        """Whether the weights of the current step are written."""
        return self._written.done()

    def resume(self, history: TrainingHistory) -> None:
        """Continue the run's counts from the log."""
        self._committer.resume(history)

    def publish_initial(self, parts: Iterable[WeightPart], *, policy_version: int) -> None:
        """Publish the run's first version."""
        artifact, _ = self._transport.publish(self._lay_out(parts), policy_version=policy_version)
        self._committer.publish_initial(artifact, policy_version=policy_version)

    def rewrite_newest_weights(
        self, published: PolicyVersionPublished, parts: Iterable[WeightPart]
    ) -> None:
        """Write the newest version again after its artifact was lost: starting engines and scorers
        need it.

        Objects are named by content, so equal weights restore the artifact that the log names.

        Raises:
            StoreUnavailable: The store does not answer.
        """
        artifact, _ = self._transport.publish(
            self._lay_out(parts), policy_version=published.policy_version
        )
        log.warning(
            "weights.restored",
            policy_version=published.policy_version,
            is_same=artifact == published.artifact,
        )

    def write_weights(self, parts: Iterable[WeightPart], *, policy_version: int) -> None:
        """Write a version; if it is written in the background, copy it and begin.

        Args:
            parts: The version's tensors; each part is used until the next is asked for.
            policy_version: Of it.
        Raises:
            ObjectError: It can't be written.
        """
        self._write_began_ns = time.time_ns()
        if self._worker.config.publishes_in_background:
            held = list(lay_out(parts, lender=self._memory))
            self._written = self._writer.submit(
                self._transport.publish, held, policy_version=policy_version
            )
        else:
            self._written = Future()
            self._written.set_result(
                self._transport.publish(self._lay_out(parts), policy_version=policy_version)
            )

    def _lay_out(self, parts: Iterable[WeightPart]) -> Iterator[FileContent]:
        return lay_out(parts, keep=self._transport.keeps_files, lender=self._memory)

    def wait_until_written(self) -> None:
        """Wait until the version is written.

        Raises:
            ObjectError: It can't be written.
        """
        self._written.result()

    def set_trained_step(self, step: TrainedStep) -> None:
        """Set the step to commit once its weights are written."""
        self._trained = step

    def commit(self) -> None:
        """Commit the trained step, if there is one, once its weights are written.

        Raises:
            ObjectError: They could not be written.
            Fenced: Another trainer took over.
        """
        if self._trained is None:
            return
        artifact, digest = self._written.result()
        failpoint("trainer.after_weights")
        trained, self._trained = self._trained, None
        step, publication = self._begin_traces(trained)
        committed = self._committer.commit_step(
            trained.results,
            train_step=trained.train_step,
            artifact=artifact,
            digest=digest,
            metrics=trained.metrics,
            phase_seconds=trained.phase_seconds,
            checkpoint=trained.checkpoint,
            is_held=trained.is_held,
            step_headers=step.headers,
            version_headers=publication.headers,
        )
        publication.end()
        step.end(_span_attributes(committed))
        failpoint("trainer.after_commit")
        self._log_step(committed)
        self._prune(committed)

    def _begin_traces(self, trained: TrainedStep) -> tuple[TracedWork, TracedWork]:
        """Start the spans of a step and of its publication."""
        headers = [headers for result in trained.results for headers in result.trace_headers]
        step = self._worker.records.traces.begin_train_step(
            trained.train_step, began_ns=trained.began_ns, headers=headers
        )
        return step, self._worker.records.traces.begin_publication(
            step, trained.train_step + 1, began_ns=self._write_began_ns
        )

    def commit_outcomes(self, ended: Sequence[PromptGroupEnded], *, train_step: int) -> None:
        """Commit outcomes that should not wait for the current train step; no trained step may be
        uncommitted.
        """
        self._committer.commit_outcomes(ended, train_step=train_step)

    def prune_weights(self, policy_version: int) -> None:
        """Delete all weights that are no longer needed, including weights that an earlier crash
        left.
        """
        config, num_slots = self._worker.config, self._worker.plan.num_slots
        weights = config.weights
        references = reference_versions(
            policy_version,
            every=config.algorithm.reference_every,
            first_version=config.first_version,
            num_slots=num_slots,
        )
        unwanted = deletable_versions(
            stored_versions(self._store),
            newest=policy_version,
            num_newest=num_newest(weights, num_slots=num_slots),
            every=weights.keep_every,
            full_snapshot_interval=weights.full_snapshot_interval,
            others=self.best.versions() | references,
        )
        delete_weights(self._store, *unwanted)

    def _log_step(self, step: TrainStepCommitted) -> None:
        self._worker.heartbeat.set_policy_version(step.policy_version)
        metrics: dict[str, Any] = {name: round(value, 6) for name, value in step.metrics.items()}
        log.info(
            "train_step.committed",
            train_step=step.train_step,
            staleness_counts=step.staleness_counts,
            update_skipped=step.update_skipped,
            **metrics,
        )

    def _prune(self, step: TrainStepCommitted) -> None:
        """Delete weights that are no longer needed and old checkpoints."""
        self.prune_weights(step.policy_version)
        if step.checkpoint is not None and step.checkpoint != self._pruned_to:
            self._pruned_to = step.checkpoint
            self._checkpoints.prune(step.checkpoint)

    def close(self) -> None:
        """Close everything; an uncommitted step will be trained again."""
        self._transport.close()
        self._writer.shutdown(wait=False, cancel_futures=True)
        self._committer.close()


def _span_attributes(step: TrainStepCommitted) -> dict[str, int | float]:
    """Return the attributes of a step's span: its metrics and phase times."""
    metrics = {f"metric.{name}": value for name, value in step.metrics.items()}
    phases = {f"phase.{name}_seconds": seconds for name, seconds in step.phase_seconds.items()}
    return {
        "policy_version": step.policy_version,
        "num_samples": len(step.sample_ids),
        **metrics,
        **phases,
    }
