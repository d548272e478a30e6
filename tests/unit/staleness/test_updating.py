"""When an engine may load a version, and which waiting prompt groups it may take."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_events.staleness import (
    choose_submissions,
    count_spare_leases,
    may_load,
    may_submit,
)

pytestmark = pytest.mark.unit


@dataclass(frozen=True)
class Waiting:
    train_step: int
    group_index: int
    required_policy_version: int = 0
    samples_per_prompt: int = 4


def choose(
    waiting: Sequence[Waiting], *, loaded: int = 9, room: int = 100, num_running: int = 0
) -> list[Waiting]:
    return choose_submissions(waiting, loaded=loaded, room=room, num_running=num_running)


@pytest.mark.parametrize(
    ("mode", "num_running", "expected"),
    [
        ("drain", 0, True),
        ("drain", 1, False),
        ("in_flight", 1, True),
        ("recompute", 1, True),
    ],
)
def test_only_drain_loads_when_nothing_runs(mode: Any, num_running: int, expected: bool) -> None:
    assert may_load(mode, num_running=num_running) is expected


@pytest.mark.parametrize(
    ("mode", "published", "refused", "expected"),
    [
        ("drain", 4, -1, True),
        ("drain", 5, -1, False),
        ("drain", 5, 5, True),
        ("drain", 6, 5, False),
        ("in_flight", 5, -1, True),
        ("recompute", 5, -1, True),
    ],
)
def test_only_drain_stops_admission_until_the_published_version_is_loaded_or_refused(
    mode: Any, published: int, refused: int, expected: bool
) -> None:
    assert may_submit(mode, published=published, loaded=4, refused=refused) is expected


@pytest.mark.parametrize("mode", [None, "finish"])
def test_mode_that_is_not_resolved_is_refused(mode: Any) -> None:
    with pytest.raises(ValueError, match=f"got {mode!r}.*run.weight_update_mode"):
        may_load(mode, num_running=0)
    with pytest.raises(ValueError, match=f"got {mode!r}.*run.weight_update_mode"):
        may_submit(mode, published=1, loaded=1, refused=-1)


def test_oldest_prompt_groups_are_submitted_first_while_there_is_room() -> None:
    groups = [Waiting(1, 0), Waiting(0, 1), Waiting(0, 0)]
    assert choose(groups, room=9) == [Waiting(0, 0), Waiting(0, 1)]


def test_prompt_group_waits_for_the_version_that_it_requires() -> None:
    groups = [Waiting(0, 0, required_policy_version=3), Waiting(1, 0, required_policy_version=2)]
    assert choose(groups, loaded=2) == [groups[1]]


def test_prompt_group_above_the_room_is_submitted_to_an_idle_engine_alone() -> None:
    large, small = Waiting(0, 0, samples_per_prompt=40), Waiting(0, 1)
    assert choose([large, small], room=8) == [large]
    assert choose([large, small], room=8, num_running=1) == [small]


@given(seed=st.integers(0, 2**32), room=st.integers(0, 20), num_running=st.integers(0, 3))
def test_submissions_fit_the_room_and_pass_over_no_older_group_that_fits(
    seed: int, room: int, num_running: int
) -> None:
    chance = random.Random(seed)
    groups = [
        Waiting(step, index, chance.randint(0, 3), chance.randint(1, 8))
        for step, index in itertools.product(range(3), range(3))
    ]
    chance.shuffle(groups)
    chosen = choose(groups, loaded=2, room=room, num_running=num_running)
    sizes = [group.samples_per_prompt for group in chosen]
    assert sum(sizes) <= room or (num_running == 0 and len(chosen) == 1)
    assert all(group.required_policy_version <= 2 for group in chosen)
    left = room - sum(sizes)
    assert not any(
        group.samples_per_prompt <= left and group.required_policy_version <= 2
        for group in groups
        if group not in chosen
    )


@pytest.mark.parametrize(
    ("num_groups", "num_running", "expected"),
    [(0, 0, 0), (4, 32, 0), (4, 25, 0), (4, 24, 1), (4, 4, 3), (2, 40, 0)],
)
def test_a_prompt_groups_worth_of_ended_samples_makes_room_for_another(
    num_groups: int, num_running: int, expected: int
) -> None:
    spare = count_spare_leases(num_groups=num_groups, num_running=num_running, samples_per_prompt=8)
    assert spare == expected


@given(
    unfinished=st.lists(st.integers(1, 8), max_size=40),
    num_lanes=st.integers(1, 32),
)
def test_prompt_groups_that_wait_for_slots_fit_the_free_ones(
    unfinished: list[int], num_lanes: int
) -> None:
    num_running = sum(unfinished)
    spare = count_spare_leases(
        num_groups=len(unfinished), num_running=num_running, samples_per_prompt=8
    )
    num_waiting = max(num_lanes + spare - len(unfinished), 0)
    num_free = max(num_lanes * 8 - num_running, 0)
    assert num_waiting * 8 <= num_free < (num_waiting + 1) * 8
