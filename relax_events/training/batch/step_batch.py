"""Trains one rank's part of a step: prompt groups go in, micro-batches are trained, and prompt
groups that can't be trained are excluded whole.

If a micro-batch is rejected, its prompt groups are tried one by one. If an earlier micro-batch
contained a part of the rejected prompt group, the step is restarted without it, since gradients
can't be subtracted.

After an out-of-memory error the step is restarted with passes of half the size. Where the pass was
a single path, its prompt group is excluded instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby, islice

import structlog

from relax_events.errors import OutOfMemory, PoisonSample, RelaxError
from relax_events.events.types import SampleReady
from relax_events.runtime.failpoints import failpoint
from relax_events.training.batch.assembly import LocatedSample
from relax_events.training.batch.packing import MicroBatcher
from relax_events.training.step_record import RankStepResult

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class UntrainableGroup:
    """A prompt group that can't be trained, with the (partition, offset) of its invalid records and
    the error. Records of a prompt group that does not fit the device are valid.
    """

    prompt_group_id: str
    policy_version: int
    positions: list[tuple[int, int]]
    error: RelaxError


class PassBudget:
    """The budget of the passes of a step, which only falls within it."""

    def __init__(
        self,
        set_max_cells: Callable[[int], None],
        *,
        budget: int,
        max_cells: int = 0,
        role: str = "trainer",
    ) -> None:
        """Set the budget.

        Args:
            set_max_cells: Sets it in the backend.
            budget: Of the run file.
            max_cells: Of a recorded step, which had less.
            role: Which trains.
        """
        self._set_max_cells, self._budget, self._role = set_max_cells, budget, role
        self._max_cells = min(max_cells or budget, budget)
        set_max_cells(self._max_cells)

    def report(self, error: OutOfMemory, *, train_step: int) -> None:
        """Log that a pass did not fit, before anything of the step is discarded."""
        if self._role == "critic":
            failpoint("critic.out_of_memory")
        else:
            failpoint("trainer.out_of_memory")
        log.warning("step.out_of_memory", train_step=train_step, error=str(error))

    def halve(self, num_cells: int) -> None:
        """Make passes smaller than one that did not fit."""
        self.lower(max(1, min(num_cells, self._max_cells) // 2))

    def lower(self, max_cells: int) -> None:
        """Make passes at most as large as these, as other ranks have them."""
        self._max_cells = min(max_cells, self._max_cells)
        self._set_max_cells(self._max_cells)

    @property
    def max_cells(self) -> int:
        """The budget."""
        return self._max_cells

    @property
    def recorded(self) -> int:
        """The budget as TrainStepCommitted has it."""
        return 0 if self._max_cells == self._budget else self._max_cells


class StepBatch:
    """See the module's docstring. Local to a rank."""

    def __init__(
        self,
        share: RankStepResult,
        batcher: MicroBatcher,
        *,
        trainer_version: int,
        accumulate: Callable[[Sequence[SampleReady]], None],
        discard: Callable[[], None],
        passes: PassBudget,
    ) -> None:
        """Start empty.

        Args:
            share: Records everything that is trained.
            batcher: Cuts samples into micro-batches.
            trainer_version: The version being trained.
            accumulate: Trains a micro-batch; adds nothing where it raises PoisonSample.
            discard: Discards everything that was accumulated in this step.
            passes: The budget of the model's passes.
        """
        self.share, self._batcher, self._version = share, batcher, trainer_version
        self._accumulate, self._discard, self._passes = accumulate, discard, passes
        share.max_cells = passes.recorded
        self._located: dict[str, LocatedSample] = {}
        self._untrainable: dict[str, UntrainableGroup] = {}
        self._trained_groups: set[str] = set()
        """Prompt groups of which at least a part was trained."""
        self._num_taken = 0

    def feed(self, samples: Sequence[LocatedSample]) -> None:
        """Add whole prompt groups, in order; train the micro-batches that they close."""
        self.share.prompt_group_ids += dict.fromkeys(
            item.sample.prompt_group_id for item in samples
        )
        self._located |= {item.sample.sample_id: item for item in samples}
        for micro_batch in self._batcher.feed(item.sample for item in samples):
            self._train(micro_batch)

    def exclude(self, group: UntrainableGroup) -> None:
        """Exclude a prompt group whose samples can't be read."""
        self._untrainable[group.prompt_group_id] = group

    @property
    def num_pending(self) -> int:
        """How many samples wait for their micro-batch to close."""
        return self._batcher.num_pending

    def flush(self) -> None:
        """Train the pending samples as a micro-batch."""
        self._train(self._batcher.flush() or [])
        self.share.prompt_group_ids[:] = [
            group_id
            for group_id in self.share.prompt_group_ids
            if group_id not in self._untrainable
        ]

    def pop_untrainable(self) -> list[UntrainableGroup]:
        """Return the prompt groups that were excluded since the last call."""
        new = list(islice(self._untrainable.values(), self._num_taken, None))
        self._num_taken = len(self._untrainable)
        return new

    def _train(self, samples: Sequence[SampleReady]) -> None:
        micro_batch = [
            sample for sample in samples if sample.prompt_group_id not in self._untrainable
        ]
        if not micro_batch:
            return
        try:
            self._accumulate(micro_batch)
        except OutOfMemory as error:
            failed = error
        except PoisonSample as error:
            groups = [
                list(members)
                for _, members in groupby(micro_batch, key=lambda sample: sample.prompt_group_id)
            ]
            if len(groups) == 1:
                self._exclude_trained(groups[0], error)
                return
            for members in groups:
                self._train(members)
            return
        else:
            self.share.add_micro_batch(
                [self._located[sample.sample_id] for sample in micro_batch],
                trainer_version=self._version,
            )
            self._trained_groups.update(sample.prompt_group_id for sample in micro_batch)
            return
        failed.__traceback__ = None  # its frames hold tensors
        self._train_smaller(micro_batch, failed)

    def _train_smaller(self, micro_batch: Sequence[SampleReady], error: OutOfMemory) -> None:
        """Train the step so far again, and a micro-batch that did not fit: in smaller passes, or
        without the prompt group of its path.
        """
        self._passes.report(error, train_step=self._version)
        if error.num_paths > 1:
            self._passes.halve(error.num_cells)
            self.share.max_cells = self._passes.recorded
        else:
            sample = self._located[error.sample_id].sample
            group_id = sample.prompt_group_id
            self._untrainable[group_id] = UntrainableGroup(
                group_id, sample.policy_version, [], error
            )
        self._restart([sample.sample_id for sample in micro_batch])

    def _exclude_trained(self, members: Sequence[SampleReady], error: PoisonSample) -> None:
        group_id = members[0].prompt_group_id
        positions = [
            (placed.partition, placed.offset)
            for placed in (self._located[sample.sample_id] for sample in members)
        ]
        self._untrainable[group_id] = UntrainableGroup(
            group_id, members[0].policy_version, positions, error
        )
        if group_id in self._trained_groups:
            self._restart()

    def _restart(self, *others: list[str]) -> None:
        """Train the micro-batches so far again, and others after them."""
        self._discard()
        self._trained_groups.clear()
        for sample_ids in [*self.share.pop_micro_batches(), *others]:
            self._train([self._located[sample_id].sample for sample_id in sample_ids])
