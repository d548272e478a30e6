"""Which versions a trainer may train on, and where a consumer may skip to.

Which complete prompt groups a train step takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal


def window(trainer_version: int, *, max_staleness: int) -> range:
    """Return the policy versions that a trainer at `trainer_version` may train on."""
    return range(max(0, trainer_version - max_staleness), trainer_version + 1)


def compute_staleness(policy_version: int, *, trainer_version: int) -> int:
    """Return how many versions a sample is behind the trainer."""
    return trainer_version - policy_version


def is_expired(policy_version: int, *, trainer_version: int, max_staleness: int) -> bool:
    """Tell whether a sample of this version may no longer be trained."""
    return compute_staleness(policy_version, trainer_version=trainer_version) > max_staleness


def find_skip_targets(
    positions: Mapping[int, int], start_offsets: Iterable[tuple[int, int]]
) -> dict[int, int]:
    """Return where to seek when a version takes over its slot: partition -> offset, for partitions
    that are behind.

    One seek passes any number of stale records; a partition that is already past the start stays
    where it is.

    Args:
        positions: Next offset to be read, by assigned partition.
        start_offsets: (partition, offset) at which the new version's records begin.
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
    its place in it.
    """

    train_step: int
    group_index: int
    attempt: int
    policy_version: int
    prompt_group_id: str


def select_groups(
    ready: Iterable[ReadyGroup], *, trainer_version: int, count: int, order: SampleOrder
) -> list[ReadyGroup]:
    """Return at most `count` prompt groups for the step at `trainer_version`, oldest first.

    `"fifo"` takes only prompt groups that were issued for this step or an earlier one: since
    exactly as many are issued for each step as it takes, none is overtaken and so none expires for
    being slow. `ready_first` takes whatever
    is complete: the step never waits for a straggler, and a straggler may expire.
    """
    eligible = [
        group for group in ready if order == "ready_first" or group.train_step <= trainer_version
    ]
    return sorted(eligible)[:count]
