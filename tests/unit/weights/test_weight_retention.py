"""Which weights are kept: the newest, every n-th, the best, and the versions that they are based
on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from relax_events.config import RunConfig
from relax_events.events.types import PolicyEvaluated
from relax_events.weights.retention import (
    BestVersions,
    deletable_versions,
    num_newest,
    reference_versions,
)

STORED = range(21)


def left(**changes: Any) -> list[int]:
    settings: dict[str, Any] = {
        "newest": 20,
        "num_newest": 4,
        "every": 0,
        "full_snapshot_interval": 1,
        "others": (),
    } | changes
    gone = deletable_versions(STORED, **settings)
    return [version for version in STORED if version not in gone]


def test_newest_versions_and_the_first_stay() -> None:
    assert left() == [0, 17, 18, 19, 20]
    assert left(newest=19) == [0, 16, 17, 18, 19, 20], "one is written that the log does not know"
    assert left(num_newest=100) == list(STORED)


def test_every_nth_version_and_the_best_versions_are_kept() -> None:
    assert left(every=5) == [0, 5, 10, 15, 17, 18, 19, 20]
    assert left(others={7, 3}) == [0, 3, 7, 17, 18, 19, 20]


@pytest.mark.parametrize(
    ("best", "expected"),
    [({7}, [0, 4, 5, 6, 7, 16, 17, 18, 19, 20]), ({8}, [0, 8, 16, 17, 18, 19, 20])],
)
def test_kept_version_also_keeps_its_delta_bases(best: set[int], expected: list[int]) -> None:
    assert left(full_snapshot_interval=4, others=best) == expected


@pytest.mark.parametrize(
    ("newest", "every", "first_version", "expected"),
    [
        (20, 0, 0, set()),
        (3, 10, 0, {0}),
        (10, 10, 0, {0, 10}),
        (13, 10, 0, {0, 10}),
        (14, 10, 0, {10}),
        (14, 10, 12, {12}),
        (7, 1, 0, {3, 4, 5, 6, 7}),
    ],
)
def test_reference_of_every_sample_in_the_window_stays(
    newest: int, every: int, first_version: int, expected: set[int]
) -> None:
    found = reference_versions(newest, every=every, first_version=first_version, num_slots=4)
    assert found == expected


def evaluated(version: int, reward: float | None, *, dataset: str = "held-out") -> PolicyEvaluated:
    return PolicyEvaluated(
        policy_version=version,
        dataset=dataset,
        num_prompts=4,
        samples_per_prompt=1,
        reward_mean=reward,
        weights_digest=bytes(32),
    )


def test_best_versions_are_those_of_the_highest_mean_reward() -> None:
    best = BestVersions(2)
    for version, reward in ((5, 0.2), (10, 0.9), (15, 0.5), (20, None), (25, 0.5)):
        best.apply(evaluated(version, reward))
    assert best.versions() == {10, 25}
    best.apply(evaluated(10, 0.0, dataset="other"))
    assert best.versions() == {25, 15}
    nothing_kept = BestVersions(0)
    nothing_kept.apply(evaluated(5, 1.0))
    assert nothing_kept.versions() == set()


@pytest.mark.parametrize(("keep", "expected"), [(0, 6), (4, 6), (50, 50)])
def test_retain_versions_does_not_affect_weight_retention(
    make_run_config: Callable[..., RunConfig], keep: int, expected: int
) -> None:
    config = make_run_config(
        run={"retain_versions": 200, "max_staleness": 1}, weights={"keep_newest": keep}
    )
    assert num_newest(config.weights, num_slots=3) == expected
