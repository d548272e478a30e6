"""Fills train batches from the recorded steps of the parent run."""

from __future__ import annotations

from relax_events.config import RunConfig
from relax_events.errors import ConfigError, PoisonSample
from relax_events.runtime.worker import Worker
from relax_events.training.batch.live_batches import IDLE_SECONDS, ROUND_SECONDS
from relax_events.training.batch.sample_intake import SampleIntake
from relax_events.training.batch.step_batch import StepBatch
from relax_events.training.ranks import Ranks
from relax_events.training.replay.parent_steps import ReplaySource
from relax_events.training.replay.recorded_batches import RecordedBatch
from relax_events.training.step_commits import StepCommits


class RecordedTraining:
    """Gives each train step the batch that the parent trained in it; `current` is the last one."""

    def __init__(
        self,
        worker: Worker,
        source: ReplaySource,
        ranks: Ranks,
        *,
        intake: SampleIntake,
        commits: StepCommits,
    ) -> None:
        self._worker, self._source, self._ranks = worker, source, ranks
        self._config: RunConfig = worker.config
        self._intake, self._commits = intake, commits
        self.current: RecordedBatch | None = None

    def close(self) -> None:
        """Close the source."""
        self._source.close()

    def fill(self, batch: StepBatch) -> bool:
        """Train the samples of the parent's next step in the parent's order; return False when the
        drain came first.
        """
        while not self._commits.agree_to_drain():
            if self._agree_on_next():
                break
            self._worker.lifecycle.tick(working=False)
        else:
            return False
        with (
            self._commits.phases.measure("decode"),
            self._worker.lifecycle.piece("read a recorded batch"),
        ):
            step = self.current = self._source.take()
        try:
            for item in step.samples:
                self._intake.require_trainable(item.sample)
            batch.feed(step.samples)
            batch.flush()
            for refused in batch.pop_untrainable():
                raise refused.error
        except PoisonSample as error:
            raise ConfigError(
                f"the rollouts of run {self._config.parent.run} can't be trained with these "
                f"settings: {error}"
            ) from error
        self._worker.lifecycle.tick(working=True)
        return True

    def _agree_on_next(self) -> bool:
        """Return whether every rank sees the parent's next step; all ranks get the same answer."""
        with self._commits.phases.measure("wait"):
            mine = self._source.has_next(
                timeout_seconds=IDLE_SECONDS if self._ranks.size == 1 else ROUND_SECONDS
            )
        return all(flag == b"1" for flag in self._ranks.all_gather_bytes(b"1" if mine else b"0"))
