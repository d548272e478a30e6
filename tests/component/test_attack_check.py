"""What `relax doctor --attack` prints and chooses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from relax_events.attacks.attack_check import (
    AttackResult,
    attack_this_machine,
    choose_assaults,
    door_name,
)
from relax_events.attacks.suite import Assault, Attack, NotPossible, Prepare
from relax_events.attacks.targets import Targets
from relax_events.cli.doctor import doctor
from relax_events.confinement.entry_points import Door
from relax_events.errors import ConfigError

pytestmark = pytest.mark.component


def assault_that(*achieved: str, target: str, part: str = "", missing: str = "") -> Assault:
    @contextmanager
    def prepare(_: Targets) -> Iterator[list[Attack]]:
        if missing:
            raise NotPossible(missing)
        yield [Attack(f"a{n}", partial(str, text)) for n, text in enumerate(achieved)]

    checked: Prepare = prepare
    return Assault(target, (Door.JUDGE_REPLY,), "pure", checked, part)


def test_parts_of_an_entry_point_are_one_line_and_broken_attacks_are_named() -> None:
    assaults = [
        assault_that("", "", target="reward a", part="one"),
        assault_that("", "got 1.0", target="reward a", part="two"),
        assault_that("", target="reward b"),
        assault_that(target="reward c", missing="mcp is not installed"),
    ]
    shown: list[AttackResult] = []
    results, log = attack_this_machine(assaults, on_result=shown.append)
    assert [result.describe() for result in results] == [
        "reward a (pure): 4 attacks, 1 BROKE\n     two: a1: got 1.0",
        "reward b (pure): 1 attacks, none broke",
        "reward c (pure): not attacked: mcp is not installed",
    ]
    assert shown == results
    assert log is not None
    log.unlink()
    tree = results[0].to_tree()
    assert tree["broken"] == [{"attack": "two: a1", "seen": ["got 1.0"]}]
    assert tree["doors"] == ["judge-reply"]


def test_log_is_deleted_where_nothing_broke() -> None:
    _, log = attack_this_machine([assault_that("", target="a")], on_result=lambda _: None)
    assert log is None


@pytest.mark.parametrize("door", Door)
def test_door_chooses_its_assaults(door: Door) -> None:
    chosen = choose_assaults(door_name(door))
    assert chosen
    assert all(door in assault.doors for assault in chosen)


def test_other_doors_are_refused_with_a_list() -> None:
    with pytest.raises(ConfigError, match=r"must be one of completion, row, .*, got 'window'"):
        choose_assaults("window")


def test_doctor_needs_a_run_file_or_the_attacks() -> None:
    with pytest.raises(ConfigError, match="give one, or --attack"):
        doctor()
    with pytest.raises(ConfigError, match="--door is for --attack"):
        doctor(door="row")
