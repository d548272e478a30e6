"""Decides which versions' weights stay in the store: the newest, every n-th, and the best by their
evaluations. Pure state.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from relax_events.config import WeightsConfig
from relax_events.events.types import Event, PolicyEvaluated
from relax_events.staleness import reference_version


def num_newest(config: WeightsConfig, *, num_slots: int) -> int:
    """Return how many of the newest versions stay: `weights.keep_newest`, and never fewer than
    engines and scorers may still fetch.
    """
    return max(config.keep_newest, 2 * num_slots)


def deletable_versions(
    stored: Iterable[int],
    *,
    newest: int,
    num_newest: int,
    every: int,
    full_snapshot_interval: int,
    others: Collection[int],
) -> list[int]:
    """Return the versions that can be deleted, oldest first.

    Version 0 stays, and so does every version newer than `newest`. A version that stays keeps the
    base versions of its deltas, back to the last full snapshot.

    Args:
        stored: Versions with any object in the store.
        newest: The newest version on the log.
        num_newest: How many of the newest stay.
        every: Multiples of this stay; 0 for none.
        full_snapshot_interval: As `weights.full_snapshot_interval`.
        others: Versions that stay for another reason: their evaluations, or as a reference.
    """
    versions = sorted(stored)
    kept = {
        version
        for version in versions
        if version > newest - num_newest or version in others or (every and version % every == 0)
    }
    needed = {
        base
        for version in kept
        for base in range(version - version % full_snapshot_interval, version)
    }
    return [version for version in versions if version > 0 and version not in kept | needed]


def reference_versions(newest: int, *, every: int, first_version: int, num_slots: int) -> set[int]:
    """Return the versions that are the reference of a sample that may still be scored; none if the
    reference is not refreshed.

    Args:
        newest: The newest version on the log.
        every: `algorithm.reference_every`.
        first_version: Of the run.
        num_slots: Of the topic plan: no sample in the window is further behind.
    """
    if not every:
        return set()
    return {
        reference_version(version, every=every, first_version=first_version)
        for version in range(max(newest - num_slots, first_version), newest + 1)
    }


@dataclass(slots=True)
class BestVersions:
    """A projection: the versions with the highest mean reward over their evaluations. Apply every
    control event, from any thread.
    """

    num_kept: int
    _rewards: dict[int, dict[str, float]] = field(default_factory=dict)

    def apply(self, event: Event) -> None:
        """Apply an event; only evaluations with a reward count."""
        if self.num_kept and isinstance(event, PolicyEvaluated) and event.reward_mean is not None:
            self._rewards = self._rewards | {
                event.policy_version: {
                    **self._rewards.get(event.policy_version, {}),
                    event.dataset: event.reward_mean,
                }
            }

    def versions(self) -> set[int]:
        """Return the best versions; of equal ones the newer."""
        means = {
            version: sum(rewards.values()) / len(rewards)
            for version, rewards in self._rewards.items()
        }
        return set(
            sorted(means, key=lambda version: (means[version], version), reverse=True)[
                : self.num_kept
            ]
        )
