"""The versions that a trainer may train on, the offsets that a consumer may skip to, and the
complete prompt groups of a train step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Literal


def window(trainer_version: int, *, max_staleness: int) -> range:
    """Return the policy versions that a trainer at `trainer_version` may train on."""
    return range(max(0, trainer_version - max_staleness), trainer_version + 1)


def compute_staleness(policy_version: int, *, trainer_version: int) -> int:
    """Return how many versions a sample is behind the trainer."""
    return trainer_version - policy_version


def is_expired(policy_version: int, *, trainer_version: int, max_staleness: int) -> bool:
    """Return whether a sample of this version is too stale to be trained."""
    return compute_staleness(policy_version, trainer_version=trainer_version) > max_staleness


def reference_version(policy_version: int, *, every: int, first_version: int) -> int:
    """Return the version whose weights are the reference of a sample: the newest one divisible by
    `every` that is not newer than the sample, and none before the run's first version.

    Args:
        policy_version: Of the sample.
        every: `algorithm.reference_every`, above 0.
        first_version: Of the run.
    """
    return max(policy_version - policy_version % every, first_version)


def find_skip_targets(
    positions: Mapping[int, int], start_offsets: Iterable[tuple[int, int]]
) -> dict[int, int]:
    """Return the offset to seek to, by partition, when a version takes over its slot.

    Only partitions whose position is before the version's first record are included. One seek
    skips any number of stale records.

    Args:
        positions: Next offset to be read, by assigned partition.
        start_offsets: (partition, offset) of the new version's first record.
    """
    return {
        partition: offset
        for partition, offset in start_offsets
        if partition in positions and positions[partition] < offset
    }


SampleOrder = Literal["fifo", "ready_first"]


@dataclass(frozen=True, slots=True, order=True)
class ReadyGroup:
    """A prompt group whose samples are all ready; ordered by the step it was issued for, then by
    its index in the batch.
    """

    train_step: int
    group_index: int
    attempt: int
    policy_version: int
    prompt_group_id: str


@dataclass(slots=True)
class _Horizon:
    """The index before which a step's batch lies, however prompt groups without an outcome end."""

    stop: int
    ended: list[int] = field(default_factory=list)
    """A heap of the indexes behind it that ended untrained."""
    seen: set[int] = field(default_factory=set)
    spares: list[ReadyGroup] = field(default_factory=list)
    """A heap of the complete prompt groups behind it."""

    def end(self, index: int) -> list[ReadyGroup]:
        """Apply that an index ended untrained; return the complete prompt groups that lie before
        the horizon now.
        """
        if index not in self.seen:
            self.seen.add(index)
            heappush(self.ended, index)
        while self.ended and self.ended[0] < self.stop:
            heappop(self.ended)
            self.stop += 1
        passed = []
        while self.spares and self.spares[0].group_index < self.stop:
            passed.append(heappop(self.spares))
        return passed


class ReadyGroups:
    """The complete prompt groups that wait for their step. A step costs as much as its changes, and
    not the number of those that wait, in each round.
    """

    def __init__(self, *, order: SampleOrder, prompts_per_step: int) -> None:
        """Start empty.

        Args:
            order: `fifo` selects only prompt groups that were issued for the step: the first
                `prompts_per_step` of those that do not end untrained, by their index. So no slow
                one is overtaken, and which ones are trained does not depend on when they are ready.
                `ready_first` selects any complete prompt group: the step never waits for a
                straggler, and a straggler may expire.
            prompts_per_step: Prompt groups of a step.
        """
        self._order, self._size = order, prompts_per_step
        self._groups: dict[str, ReadyGroup] = {}
        self._oldest: list[ReadyGroup] = []
        """A heap, in which removed ones stay until they are the oldest."""
        self._admitted: set[str] = set()
        """Those that are in the heap, and not behind a horizon."""
        self._num_by_step = Counter[int]()
        self._horizons: dict[int, _Horizon] = {}
        """Of the steps with ended or spare prompt groups."""

    def apply(
        self,
        ready: Iterable[ReadyGroup],
        removed: Iterable[str],
        ended: Iterable[tuple[int, int]] = (),
    ) -> None:
        """Add prompt groups, each in the place of an older generation, and remove others, which may
        be absent.

        Args:
            ready: Complete prompt groups.
            removed: Ids of those that no longer are.
            ended: Train step and index of prompt groups that ended untrained.
        """
        for group_id in removed:
            self._remove(group_id)
        for group in ready:
            self._remove(group.prompt_group_id)
            self._groups[group.prompt_group_id] = group
            if self._order == "ready_first" or group.group_index < self._find_end(group.train_step):
                self._admit(group)
            else:
                heappush(self._open_horizon(group.train_step).spares, group)
        if self._order == "fifo":
            for step, index in ended:
                for group in self._open_horizon(step).end(index):
                    if self._groups.get(group.prompt_group_id) == group:
                        self._admit(group)

    def _find_end(self, step: int) -> int:
        horizon = self._horizons.get(step)
        return self._size if horizon is None else horizon.stop

    def _open_horizon(self, step: int) -> _Horizon:
        return self._horizons.setdefault(step, _Horizon(self._size))

    def _admit(self, group: ReadyGroup) -> None:
        if group.prompt_group_id not in self._admitted:
            self._admitted.add(group.prompt_group_id)
            self._num_by_step[group.train_step] += 1
            heappush(self._oldest, group)

    def _remove(self, group_id: str) -> None:
        group = self._groups.pop(group_id, None)
        if group is None or group_id not in self._admitted:
            return
        self._admitted.remove(group_id)
        self._num_by_step[group.train_step] -= 1
        if not self._num_by_step[group.train_step]:
            del self._num_by_step[group.train_step]

    def count_eligible(self, trainer_version: int) -> int:
        """Return how many prompt groups the step at `trainer_version` may train."""
        return sum(
            number
            for train_step, number in self._num_by_step.items()
            if self._is_eligible(train_step, trainer_version)
        )

    def _is_eligible(self, train_step: int, trainer_version: int) -> bool:
        return self._order == "ready_first" or train_step <= trainer_version

    def take(self, count: int, *, trainer_version: int) -> list[ReadyGroup]:
        """Remove and return at most `count` prompt groups for the step at `trainer_version`, oldest
        first.
        """
        for step in [step for step in self._horizons if step < trainer_version]:
            del self._horizons[step]
        taken: list[ReadyGroup] = []
        while self._oldest and len(taken) < count:
            group = self._oldest[0]
            if self._groups.get(group.prompt_group_id) != group:
                heappop(self._oldest)
            elif self._is_eligible(group.train_step, trainer_version):
                self._remove(heappop(self._oldest).prompt_group_id)
                taken.append(group)
            else:
                break
        return taken
