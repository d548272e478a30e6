"""Opens the batch of a train step: micro-batches that a rank trains alone, or rounds of all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from relax_events.config import RunConfig
from relax_events.events.types import SampleReady
from relax_events.training.batch.lockstep_batch import LockstepBatch
from relax_events.training.batch.packing import MicroBatcher
from relax_events.training.batch.step_batch import PassBudget, StepBatch
from relax_events.training.ranks import Ranks
from relax_events.training.smaller_steps import SmallerSteps
from relax_events.training.step_record import RankStepResult


@dataclass(frozen=True, slots=True)
class BatchOpener:
    """See the module's docstring.

    Attributes:
        config: Of the run.
        ranks: This process and its peers.
        accumulate: Trains a micro-batch.
        discard: Discards what was accumulated in this step.
        set_max_cells: Sets the budget of the model's passes from here on.
        smaller: What fits in a step that ran out of memory before.
        role: Which trains.
    """

    config: RunConfig
    ranks: Ranks
    accumulate: Callable[[Sequence[SampleReady]], None]
    discard: Callable[[], None]
    set_max_cells: Callable[[int], None]
    smaller: SmallerSteps
    role: str = "trainer"

    @property
    def is_in_rounds(self) -> bool:
        """Whether the ranks train in rounds, from one plan a step."""
        return self.ranks.size > 1

    @property
    def trains_at_once(self) -> bool:
        """Whether a micro-batch is computed when it closes, not once the whole step is there."""
        trainer = self.config.trainer
        return (
            trainer.backend == "torch"
            and self.ranks.size == 1
            and not trainer.has_mini_batches
            and not self.config.algorithm.needs_whole_step
        )

    def micro_batcher(self) -> MicroBatcher:
        """Return what cuts samples into micro-batches within the run's budget."""
        return MicroBatcher(
            max_tokens=self.config.trainer.max_tokens_per_micro_batch,
            whole_prompt_groups=self.config.algorithm.needs_whole_groups,
        )

    def streamed(self, version: int, *, max_cells: int = 0) -> StepBatch:
        """Open a batch that trains samples as they are fed, without the other ranks; `max_cells`
        is that of a recorded step.
        """
        return StepBatch(
            RankStepResult(self.ranks.at.data),
            self.micro_batcher(),
            trainer_version=version,
            accumulate=self.accumulate,
            discard=self.discard,
            passes=self._budget(version, max_cells),
        )

    def in_rounds(self, version: int, *, max_cells: int = 0) -> LockstepBatch:
        """Open a batch that all ranks train in rounds; `max_cells` is that of a recorded step."""
        return LockstepBatch(
            RankStepResult(self.ranks.at.data),
            self.ranks,
            trainer_version=version,
            accumulate=self.accumulate,
            discard=self.discard,
            passes=self._budget(version, max_cells),
        )

    def _budget(self, version: int, max_cells: int) -> PassBudget:
        budget = self.config.trainer.max_tokens_per_micro_batch
        max_cells = min(max_cells or budget, self.smaller.bounds(version).max_cells or budget)
        return PassBudget(self.set_max_cells, budget=budget, max_cells=max_cells, role=self.role)
