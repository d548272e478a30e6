"""Recovers by replay: reads the recorded batches from the log and trains them again in recorded
order.

No rollout is generated twice, and the other roles continue. On the CPU the resulting weights equal
the published ones bit for bit, which the digest of each step verifies. A step whose update was
skipped is skipped again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import groupby

import structlog

from relax_events.errors import RunFailed
from relax_events.events.types import TrainStepCommitted
from relax_events.kafka.log_reader import LogReader
from relax_events.runtime.failpoints import failpoint
from relax_events.runtime.worker import Worker
from relax_events.training.backend.protocol import TrainerBackend
from relax_events.training.ranks import Ranks
from relax_events.training.replay.recorded_batches import RecordedBatch, RecordedBatches
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
        self._worker, self._backend = worker, backend
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
            same = weights_digest(self._backend.weights()) == steps[-1].weights_digest
        log.info(
            "train_steps.replayed",
            num_steps=len(steps),
            policy_version=self._backend.policy_version,
            identical=same,
            seconds=time.monotonic() - started,
        )
        return same

    def _train(self, batch: RecordedBatch) -> None:
        if batch.step.train_step != self._backend.policy_version:
            raise RunFailed(
                f"the log goes from version {self._backend.policy_version} to step "
                f"{batch.step.train_step}; the control log has a gap"
            )
        if batch.step.update_skipped:
            self._backend.skip_step()
        else:
            self._update(batch)
        failpoint("trainer.replaying")
        self._worker.lifecycle.tick(working=True)

    def _update(self, batch: RecordedBatch) -> None:
        for _, members in groupby(
            zip(batch.samples, batch.micro_batches, strict=True), key=lambda pair: pair[1]
        ):
            with self._worker.lifecycle.piece("replay a micro-batch"):
                self._backend.accumulate([placed.sample for placed, _ in members])
            self._worker.lifecycle.record_progress()
        with self._worker.lifecycle.piece("replay an optimizer step"):
            self._backend.step()
