"""Trains one rank's part of a step: prompt groups go in, micro-batches are trained, and prompt
groups that can't be trained are excluded whole.

If a micro-batch is rejected, its prompt groups are tried one by one. If an earlier micro-batch
contained a part of the rejected prompt group, the step is restarted without it, since gradients
can't be subtracted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from relax_events.errors import PoisonSample, RelaxError
from relax_events.events.types import SampleReady
from relax_events.training.batch.assembly import LocatedSample
from relax_events.training.batch.packing import MicroBatcher
from relax_events.training.step_record import RankStepResult


@dataclass(frozen=True, slots=True)
class UntrainableGroup:
    """A prompt group that can't be trained, with the (partition, offset) of its invalid records and
    the error.
    """

    prompt_group_id: str
    policy_version: int
    positions: list[tuple[int, int]]
    error: RelaxError


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
    ) -> None:
        """Start empty.

        Args:
            share: Records everything that is trained.
            batcher: Cuts samples into micro-batches.
            trainer_version: The version being trained.
            accumulate: Trains a micro-batch; adds nothing where it raises PoisonSample.
            discard: Discards everything that was accumulated in this step.
        """
        self.share, self._batcher, self._version = share, batcher, trainer_version
        self._accumulate, self._discard = accumulate, discard
        self._located: dict[str, LocatedSample] = {}
        self._untrainable: dict[str, UntrainableGroup] = {}
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

    def pop_untrainable(self) -> list[UntrainableGroup]:
        """Return the prompt groups that were excluded since the last call."""
        new = list(self._untrainable.values())[self._num_taken :]
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
        self.share.add_micro_batch(
            [self._located[sample.sample_id] for sample in micro_batch],
            trainer_version=self._version,
        )

    def _exclude_trained(self, members: Sequence[SampleReady], error: PoisonSample) -> None:
        group_id = members[0].prompt_group_id
        positions = [
            (placed.partition, placed.offset)
            for placed in (self._located[sample.sample_id] for sample in members)
        ]
        self._untrainable[group_id] = UntrainableGroup(
            group_id, members[0].policy_version, positions, error
        )
        self.share.prompt_group_ids.remove(group_id)
        if not any(
            self._located[sample_id].sample.prompt_group_id == group_id
            for sample_id in self.share.sample_ids
        ):
            return
        self._discard()
        trained = self.share.pop_micro_batches()
        for sample_ids in trained:
            self._train([self._located[sample_id].sample for sample_id in sample_ids])
