"""Recovers a trainer: loads the newest checkpoint, reads the recorded batches since then from the
log, and trains them again in recorded order.

No rollout is generated twice, and the other roles continue. On the CPU the resulting weights equal
the published ones bit for bit, which the digest of each step verifies. A step whose update was
skipped or held has none again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import structlog

from relax_events.errors import RunFailed
from relax_events.events.parts import CheckpointRef
from relax_events.events.types import TrainStepCommitted
from relax_events.kafka.log_reader import LogReader
from relax_events.objects import ObjectStore
from relax_events.projections.training_history import TrainingHistory
from relax_events.runtime.failpoints import failpoint
from relax_events.runtime.run_description import ParentRun
from relax_events.runtime.worker import Worker
from relax_events.training.backend.protocol import TrainerBackend
from relax_events.training.backend.weight_stream import collect_weights, weight_parts
from relax_events.training.checkpoint.checkpoints import Checkpoints
from relax_events.training.publishing import StepPublisher
from relax_events.training.ranks import Ranks
from relax_events.training.replay.recorded_batches import RecordedBatch, RecordedBatches
from relax_events.training.replay.start_weights import (
    is_newest_lost,
    load_parent_weights,
    load_published_weights,
)
from relax_events.weights.artifact_writer import weights_digest

log = structlog.get_logger()


class Replay:
    """Trains committed steps again. Collective: every rank replays its own share of each step."""

    def __init__(
        self,
        worker: Worker,
        backend: TrainerBackend,
        ranks: Ranks,
        *,
        batches: RecordedBatches | None = None,
    ) -> None:
        self._worker, self._backend, self._ranks = worker, backend, ranks
        self._batches = batches or RecordedBatches(worker, ranks)

    def run(self, steps: Sequence[TrainStepCommitted]) -> bool:
        """Train the steps again; return whether the resulting weights have the digest of the last
        step.

        Raises:
            RunFailed: The steps don't follow the backend's version, or a record differs from the
                trained one.
        """
        if not steps:
            return True
        started = time.monotonic()
        reader = LogReader(self._worker.connection)
        try:
            batches = self._batches.read(reader, steps)
            for _ in steps:
                with self._worker.lifecycle.piece("read a recorded batch"):
                    batch = next(batches)
                self._train(batch)
        finally:
            reader.close()
        with self._worker.lifecycle.transfer("check the replayed weights"):
            same = self._has_digest(steps[-1].weights_digest)
        log.info(
            "train_steps.replayed",
            num_steps=len(steps),
            policy_version=self._backend.policy_version,
            identical=same,
            seconds=time.monotonic() - started,
        )
        return same

    def _has_digest(self, expected: bytes) -> bool:
        """Tell all ranks whether the weights have this digest; rank 0 computes it."""
        tensors = collect_weights(self._backend)
        if self._ranks.rank:
            return bool(self._ranks.broadcast(None))
        is_same = weights_digest(tensors) == expected
        self._ranks.broadcast(b"same" * is_same)
        return is_same

    def _train(self, batch: RecordedBatch) -> None:
        if batch.step.train_step != self._backend.policy_version:
            raise RunFailed(
                f"the log goes from version {self._backend.policy_version} to step "
                f"{batch.step.train_step}; the control log has a gap"
            )
        if batch.step.update_skipped or batch.step.update_held:
            self._backend.skip_step()
        else:
            self._update(batch)
        failpoint("trainer.replaying")
        self._worker.lifecycle.tick(working=True)

    def _update(self, batch: RecordedBatch) -> None:
        budget = self._worker.config.trainer.max_tokens_per_micro_batch
        self._backend.max_cells = batch.step.max_cells or budget
        for micro_batch in batch.rounds():
            with self._worker.lifecycle.piece("replay a micro-batch"):
                self._backend.accumulate([placed.sample for placed in micro_batch])
            self._worker.lifecycle.record_progress()
        with self._worker.lifecycle.piece("replay an optimizer step"):
            self._backend.step()
        self._backend.max_cells = budget


class Recovery:
    """Brings a trainer's backend to the newest version on the log. Collective: every rank calls
    every method, in order.
    """

    def __init__(
        self,
        history: TrainingHistory,
        worker: Worker,
        backend: TrainerBackend,
        ranks: Ranks,
        *,
        store: ObjectStore,
    ) -> None:
        self._history, self._worker, self._backend = history, worker, backend
        self._ranks, self._store = ranks, store

    def load_start(
        self, checkpoints: Checkpoints, *, source: ParentRun | None
    ) -> CheckpointRef | None:
        """Load the newest checkpoint; without one, the weights of the parent run.

        Returns:
            The checkpoint of the loaded state; None where the model's own weights are the start.
        Raises:
            RunFailed: Without a checkpoint, the log must hold all steps, and it does not.
        """
        history = self._history
        restored = checkpoints.load_newest(history.checkpoints())
        if restored is not None:
            self._backend.load_state(restored.state)
            history.apply_checkpoint(restored.extra)
            log.info("checkpoint.loaded", policy_version=self._backend.policy_version)
            return restored.reference
        history.require_steps_from(self._worker.config.first_version)
        if source is None:
            return None
        return load_parent_weights(
            source, self._worker, self._backend, ranks=self._ranks, checkpoints=checkpoints
        )

    def train_missing_steps(self, batches: RecordedBatches | None) -> None:
        """Train the committed steps since the loaded version again; where their weights differ from
        the published ones, load those.

        Args:
            batches: Of a replay; None reads this run's own.
        """
        missing = [
            step for step in self._history.steps if step.train_step >= self._backend.policy_version
        ]
        replay = Replay(self._worker, self._backend, self._ranks, batches=batches)
        if not replay.run(missing):
            with self._worker.lifecycle.transfer("read the published weights"):
                load_published_weights(
                    self._history,
                    self._backend,
                    run_id=self._worker.config.run.id,
                    store=self._store,
                )

    def publish_missing_weights(self, publisher: StepPublisher | None) -> None:
        """Publish the first version of a fresh run, or write the newest version again where its
        objects are lost; then prune old weights.

        Args:
            publisher: Of rank 0; None on the others.
        """
        history = self._history
        with self._worker.lifecycle.transfer("write the first weights"):
            is_lost = not history.is_fresh and is_newest_lost(
                history.published[-1], store=self._store, ranks=self._ranks
            )
            parts = weight_parts(self._backend) if history.is_fresh or is_lost else iter(())
            if publisher is None:
                deque(parts, maxlen=0)  # every rank takes part
                return
            publisher.resume(history)
            if history.is_fresh:
                publisher.publish_initial(parts, policy_version=self._worker.config.first_version)
            elif is_lost:
                publisher.rewrite_newest_weights(history.published[-1], parts)
            publisher.prune_weights(self._backend.policy_version)
