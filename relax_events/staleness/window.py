"""Which versions a trainer may train on, and where a consumer may skip to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


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
