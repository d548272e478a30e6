"""The benchmarks' time bound against schedules worked out by hand: one token per second unless a
test says otherwise, times in seconds.
"""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.critical_path import CriticalPath, Schedule
from benchmarks.profiles import Lengths, Timing

pytestmark = pytest.mark.unit
TWO_GROUPS = [[3, 5], [2, 4]]


def path(
    steps: list[list[list[int]]], *, timing: dict[str, Any] | None = None, **schedule: Any
) -> list[float]:
    """Calculate when versions are published, with one engine."""
    speeds = {
        "lengths": Lengths(median_tokens=1, sigma=0, cap_tokens=1, record_divisor=1),
        "time_scale": 1.0,
        "num_engines": 1,
        "devices_per_engine": 1.0,
        "peak_tokens_per_second": 1e12,
        "half_load": 1e12,
        "train_token_seconds": 0.1,
        "forward_token_seconds": 0.0,
        "update_seconds": 0.5,
        "to_train_seconds": 0.0,
        "load_seconds": 2.0,
    }
    rules = {
        "num_steps": len(steps),
        "max_staleness": 0,
        "colocated": False,
        "weight_update_mode": "in_flight",
        "lanes_per_engine": 4,
    }
    return CriticalPath(
        Timing(**{**speeds, **(timing or {})}), Schedule(**{**rules, **schedule}), steps
    ).run()


def test_critical_path_alternates_when_engine_and_trainer_share_devices() -> None:
    # Step: 5 for the longest sample, 1 for the switch, 14 tokens x 0.1, 0.5; from the second on
    # also 2 for the switch back.
    published = path([TWO_GROUPS, TWO_GROUPS], timing={"to_train_seconds": 1.0}, colocated=True)
    assert published == pytest.approx([0.0, 7.9, 17.8])


def test_critical_path_trains_prompt_groups_as_they_come_when_on_policy() -> None:
    # The second is there at 4 and takes 0.6, the first at 5 and takes 0.8, then 0.5.
    assert path([TWO_GROUPS, TWO_GROUPS]) == pytest.approx([0.0, 6.3, 14.6])


def test_critical_path_overlaps_steps_when_staleness_is_allowed() -> None:
    # Step 1 was generated next to step 0. Step 2 is issued at 6.3, but version 2 of 8.2 is loaded
    # before it runs: 10.2 to 14.2 and 15.2.
    assert path([TWO_GROUPS] * 3, max_staleness=1) == pytest.approx([0.0, 6.3, 8.2, 16.5])


def test_critical_path_queues_prompt_groups_when_lanes_are_few() -> None:
    # One after the other: at 5 and at 9.
    assert path([TWO_GROUPS], lanes_per_engine=1) == pytest.approx([0.0, 10.1])


def test_critical_path_slows_samples_down_when_many_run() -> None:
    # Two share 2 / (2 + 1) tokens per second each until 3, the second continues alone at 1: 5; then
    # 6 x 0.1 and 0.5.
    assert path(
        [[[2, 4]]], timing={"peak_tokens_per_second": 2.0, "half_load": 1.0}
    ) == pytest.approx([0.0, 6.1])


def test_critical_path_spreads_prompt_groups_over_engines_when_there_are_several() -> None:
    timing = {
        "peak_tokens_per_second": 2.0,
        "half_load": 1.0,
        "num_engines": 2,
        "train_token_seconds": 0.0,
    }
    # Two samples on each engine, at 2/3 tokens per second.
    assert path([[[4, 4], [4, 4]]], timing=timing) == pytest.approx([0.0, 6.5])


def test_critical_path_passes_prompt_groups_through_the_forward_roles() -> None:
    # The second: 4 to 4.6, trained to 5.2; the first: 5 to 5.8, trained to 6.6.
    assert path([TWO_GROUPS], timing={"forward_token_seconds": 0.1}) == pytest.approx([0.0, 7.1])


@pytest.mark.parametrize(
    ("weight_update_mode", "published"),
    [
        # Swap: loading from 2.5 to 4.5 delays the sample of step 1 from 10 to 12; that of step 2
        # runs next to it.
        ("in_flight", [0.0, 2.5, 12.5, 13.0]),
        # Finish: the sample of step 1 ends at 10, loading takes until 12, that of step 2 until 13.
        ("drain", [0.0, 2.5, 10.5, 13.5]),
    ],
)
def test_critical_path_models_each_weight_update_mode(
    weight_update_mode: str, published: list[float]
) -> None:
    timing = {"train_token_seconds": 0.0}
    assert path(
        [[[2]], [[10]], [[1]]],
        timing=timing,
        max_staleness=1,
        weight_update_mode=weight_update_mode,
    ) == pytest.approx(published)
