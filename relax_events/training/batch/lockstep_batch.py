"""Trains one rank's part of a step in rounds: in each, every rank trains one micro-batch, which may
be empty. So a backend's forward pass may be collective.

A sample that can't be read or trained costs its whole prompt group, on every rank. The ranks learn
of it at the end of the rounds; if a part of the prompt group was trained, they train the step again
without it, since gradients can't be subtracted.

After an out-of-memory error on a rank, all train the step again, in passes of half the size. Where
the pass was a single path, its prompt group is excluded instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import orjson

from relax_events.errors import OutOfMemory, PoisonSample, RelaxError
from relax_events.events.types import SampleReady
from relax_events.runtime.record_io import UNUSABLE
from relax_events.training.batch.assembly import LocatedSample
from relax_events.training.batch.step_batch import PassBudget
from relax_events.training.ranks import Ranks
from relax_events.training.step_record import RankStepResult

Decode = Callable[[], LocatedSample]
"""Returns the sample; raises one of `UNUSABLE`."""


@dataclass(frozen=True, slots=True)
class UndecodedSample:
    """A sample that is decoded when its micro-batch is trained, and its record's partition and
    offset.
    """

    prompt_group_id: str
    position: tuple[int, int]
    decode: Decode

    @classmethod
    def of(cls, located: LocatedSample) -> UndecodedSample:
        """Return a sample that is decoded already."""
        position = located.partition, located.offset
        return cls(located.sample.prompt_group_id, position, lambda: located)


@dataclass(frozen=True, slots=True)
class ExcludedGroup:
    """A prompt group that can't be trained, with the (partition, offset) of its invalid records and
    the error's text. Records of a prompt group that does not fit the device are valid.
    """

    prompt_group_id: str
    positions: list[tuple[int, int]]
    error: str


MicroBatch = Sequence[UndecodedSample]


class LockstepBatch:
    """See the module's docstring. `train` is collective."""

    def __init__(
        self,
        share: RankStepResult,
        ranks: Ranks,
        *,
        trainer_version: int,
        accumulate: Callable[[Sequence[SampleReady]], None],
        discard: Callable[[], None],
        passes: PassBudget,
    ) -> None:
        """Start empty.

        Args:
            share: Records everything that is trained; nothing on ranks that are no data leaders.
            ranks: This process and its peers.
            trainer_version: The version being trained.
            accumulate: Trains a micro-batch, also an empty one; where it raises PoisonSample it
                has added nothing, and called no collective.
            discard: Discards everything that was accumulated in this step.
            passes: The budget of the model's passes, of this rank.
        """
        share.max_cells = passes.recorded
        self._passes, self._ran_out_of_memory = passes, False
        self.share, self._ranks, self._version = share, ranks, trainer_version
        self._accumulate, self._discard = accumulate, discard
        self._rounds: list[MicroBatch] = []
        self._next = 0
        self._trained_groups: set[str] = set()
        self._excluded: dict[str, ExcludedGroup] = {}
        self._new_exclusions: list[ExcludedGroup] = []
        self._failed: set[str] = set()
        """All excluded prompt groups, as far as this rank knows them."""
        self._retries: list[MicroBatch] = []

    def train(self, micro_batches: Sequence[MicroBatch]) -> list[ExcludedGroup]:
        """Train micro-batches, as many rounds as the rank with most of them needs; return the
        prompt groups that were excluded, which all ranks learn.
        """
        known_groups = set(self._excluded)
        self._append(micro_batches)
        while self._next < len(self._rounds):
            self._train_round(self._rounds[self._next])
            self._next += 1
            if self._next == len(self._rounds):
                self._agree()
        return [group for name, group in self._excluded.items() if name not in known_groups]

    def _append(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Add rounds; collective."""
        counts = self._ranks.all_gather(np.array([len(micro_batches)], np.int64))
        self._rounds += micro_batches
        self._rounds += [()] * (int(counts.max()) - len(micro_batches))

    def _train_round(self, micro_batch: MicroBatch) -> None:
        located = [] if self._ran_out_of_memory else self._decode(micro_batch)
        try:
            self._accumulate([item.sample for item in located])
        except PoisonSample as error:
            self._blame(micro_batch, located, error)
            is_trained = False
        except OutOfMemory as error:  # kept nowhere: its frames hold tensors
            self._make_room(located, error)
            is_trained = False
        else:
            is_trained = True
        if not is_trained:
            located = []
            self._accumulate([])
        self._trained_groups |= {item.sample.prompt_group_id for item in located}
        if self._ranks.at.is_data_leader:
            self.share.add_micro_batch(located, trainer_version=self._version)

    def _decode(self, micro_batch: MicroBatch) -> list[LocatedSample]:
        """Return the samples of the prompt groups that can be trained, as far as is known."""
        located = []
        for item in micro_batch:
            if item.prompt_group_id in self._failed:
                continue
            try:
                located.append(item.decode())
            except UNUSABLE as error:  # it could be had when its record came
                self._exclude(item.prompt_group_id, [item.position], error)
        return [item for item in located if item.sample.prompt_group_id not in self._failed]

    def _blame(
        self, micro_batch: MicroBatch, located: Sequence[LocatedSample], error: PoisonSample
    ) -> None:
        """Exclude the prompt group of a rejected micro-batch; where there are several, try each in
        a round of its own.
        """
        groups: dict[str, list[UndecodedSample]] = {
            item.sample.prompt_group_id: [] for item in located
        }
        if len(groups) == 1:
            positions = [(item.partition, item.offset) for item in located]
            self._exclude(next(iter(groups)), positions, error)
            return
        self._rounds[self._next] = ()
        for item in micro_batch:
            if item.prompt_group_id in groups:
                groups[item.prompt_group_id].append(item)
        self._retries += groups.values()

    def _make_room(self, located: Sequence[LocatedSample], error: OutOfMemory) -> None:
        """Make passes smaller, or exclude the prompt group of a path that did not fit alone. What
        this rank would train until the ranks agree would be discarded.
        """
        self._passes.report(error, train_step=self._version)
        self._ran_out_of_memory = True
        if error.num_paths > 1:
            self._passes.halve(error.num_cells)
            return
        (sample,) = [item.sample for item in located if item.sample.sample_id == error.sample_id]
        self._exclude(sample.prompt_group_id, [], error)

    def _exclude(self, group_id: str, positions: list[tuple[int, int]], error: RelaxError) -> None:
        self._failed.add(group_id)
        self._new_exclusions.append(ExcludedGroup(group_id, positions, str(error)))

    def _agree(self) -> None:
        """Tell all ranks which prompt groups are excluded and how large passes may be, add the
        rounds that try others again, and begin again if a part of an excluded one was trained, or
        a rank ran out of memory; collective.
        """
        groups, self._new_exclusions = self._new_exclusions, []
        for group in _gather_groups(groups, ranks=self._ranks):
            self._excluded.setdefault(group.prompt_group_id, group)
            self._failed.add(group.prompt_group_id)
        budgets = self._ranks.all_gather(np.array([self._passes.max_cells], np.int64))
        self._passes.lower(int(budgets.min()))
        self.share.max_cells = self._passes.recorded
        is_tainted = self._ran_out_of_memory or not self._trained_groups.isdisjoint(self._excluded)
        self._ran_out_of_memory = False
        retries, self._retries = self._retries, []
        if self._ranks.all_gather(np.array([is_tainted])).any():
            self._discard()
            self.share.pop_micro_batches()
            self._trained_groups.clear()
            self._next = 0
        self._append(retries)


def _gather_groups(groups: Iterable[ExcludedGroup], *, ranks: Ranks) -> list[ExcludedGroup]:
    rows = ranks.all_gather_bytes(orjson.dumps([asdict(group) for group in groups]))
    items: list[dict[str, Any]] = [item for row in rows for item in orjson.loads(row)]
    return [
        ExcludedGroup(
            item["prompt_group_id"],
            [(partition, offset) for partition, offset in item["positions"]],
            item["error"],
        )
        for item in items
    ]
