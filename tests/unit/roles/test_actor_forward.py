"""The actor-forward role scores under several policy versions, and keeps few of them in memory."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

from event_samples import published

from relax_events.roles.versioned_weights import MAX_VERSIONS, VersionedWeights


class Artifact:
    """Weights of a version, counted while they live."""

    alive = 0

    def __init__(self, policy_version: int, transport: str) -> None:
        self.policy_version, self.transport = policy_version, transport
        Artifact.alive += 1

    def __del__(self) -> None:
        Artifact.alive -= 1


class Stage:
    """Requested versions: which were read from the store, and how many were in memory at each
    read."""

    def __init__(self) -> None:
        self.transport = "store"
        self.read: list[int] = []
        self.held: list[int] = []
        self.loaded: list[int] = []
        worker: Any = SimpleNamespace(
            plan=SimpleNamespace(num_slots=8),
            control=SimpleNamespace(latest=None),
            heartbeat=SimpleNamespace(set_policy_version=lambda _: None),
            lifecycle=SimpleNamespace(transfer=lambda name: nullcontext()),
        )
        scorer: Any = SimpleNamespace(
            load_weights=lambda weights: self.loaded.append(weights.policy_version)
        )
        self.versions = VersionedWeights(worker, scorer, self)  # type: ignore[arg-type]
        for version in range(6):
            self.versions.apply(published(version))

    def fetch(self, event: Any) -> Any:
        self.held.append(Artifact.alive)
        self.read.append(event.policy_version)
        return Artifact(event.policy_version, self.transport)


def test_at_most_two_versions_are_held_even_while_loading_the_next() -> None:
    stage = Stage()
    for version in (0, 0, 1, 2, 3, 4, 5):
        assert stage.versions.use(version) == version
    assert stage.read == stage.loaded == [0, 1, 2, 3, 4, 5]
    assert max(stage.held) == MAX_VERSIONS - 1
    assert Artifact.alive == MAX_VERSIONS


def test_alternating_versions_are_read_once_and_an_evicted_one_is_read_again() -> None:
    stage = Stage()
    for version in (3, 4, 3, 4, 3, 5, 3, 4):
        stage.versions.use(version)
    assert stage.read == [3, 4, 5, 4], "the one that was used longest ago went"
    assert stage.loaded == [3, 4, 3, 4, 3, 5, 3, 4]


def test_version_that_the_trainer_sent_is_dropped_before_the_next_one_is_read() -> None:
    stage = Stage()
    stage.transport = "memory"
    for version in (3, 4, 3):
        stage.versions.use(version)
    assert stage.read == [3, 4, 3], "its memory may have been received into again"
