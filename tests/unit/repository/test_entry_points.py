"""Every place where foreign bytes enter has a confinement profile, and every process that we start
has a known launcher."""

from __future__ import annotations

import ast
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

import pytest

import relax_events
from relax_events.attacks.doors import list_assaults
from relax_events.confinement.entry_points import (
    BOUNDED_POINTS,
    ENTRY_POINTS,
    USER_ENVIRONMENT,
    USER_REWARD,
    USER_SESSIONS,
    Door,
    find_environment,
    find_reward,
)
from relax_events.confinement.profiles import Profile

PACKAGE = Path(relax_events.__file__).parent
LAUNCHERS = {
    "confinement/child.py": "all children that answer requests",
    "sandbox/runner.py": "the first process of a sandbox",
    "packages/gateway/program.py": "the program of an episode",
    "packages/gateway/program_guard.py": "the same program, below its guard",
    "engines/sglang/process.py": "the SGLang server",
    "kafka/embedded/java.py": "the embedded broker and its tools",
    "launcher/own_process.py": "the fork server, and relax run from Python, without foreign bytes",
    "launcher/preparation.py": "our own commands",
    "packages/dashboard/run_page.py": "our own page",
    "session/gpus.py": "asks the driver for its GPUs",
}
"""The modules that start processes, and what they start."""
STARTS = {"Popen", "run", "create_subprocess_exec", "create_subprocess_shell", "check_output"}


def installed(group: str) -> list[str]:
    return sorted(
        one.name
        for one in entry_points(group=group)
        if one.dist is not None and one.dist.name == "relax-events"
    )


@pytest.mark.parametrize("name", installed("relax_events.rewards"))
def test_reward_of_the_package_has_a_profile(name: str) -> None:
    assert find_reward(name) is not USER_REWARD


@pytest.mark.parametrize("name", installed("relax_events.environments"))
def test_environment_of_the_package_has_a_profile(name: str) -> None:
    found = {find_environment(name, has_sessions=has_sessions) for has_sessions in (False, True)}
    assert not found & {USER_ENVIRONMENT, USER_SESSIONS}


def test_only_the_users_own_code_is_trusted() -> None:
    trusted = {point.name for point in ENTRY_POINTS if point.profile is Profile.TRUSTED}
    assert trusted == {USER_REWARD.name, USER_ENVIRONMENT.name, USER_SESSIONS.name}
    assert find_reward("my_rewards.py:score") is USER_REWARD


def test_every_door_of_every_entry_point_is_attacked() -> None:
    attacked: dict[str, set[Door]] = {}
    for assault in list_assaults():
        attacked.setdefault(assault.target, set()).update(assault.doors)
    points = (*ENTRY_POINTS, *BOUNDED_POINTS)
    assert {point.name: set(point.doors) - attacked.get(point.name, set()) for point in points} == {
        point.name: set() for point in points
    }
    assert attacked.keys() == {point.name for point in points} | {
        f"profile {profile}" for profile in Profile
    }
    assert {door for doors in attacked.values() for door in doors} == set(Door)


def test_names_of_attacks_are_unique() -> None:
    names = [assault.name for assault in list_assaults()]
    assert len(set(names)) == len(names)


def test_modules_of_bounded_points_exist() -> None:
    for point in BOUNDED_POINTS:
        assert find_spec(point.module) is not None
        assert point.bounds


def test_names_are_unique_and_what_is_not_pure_says_why() -> None:
    names = [point.name for point in (*ENTRY_POINTS, *BOUNDED_POINTS)]
    assert len(set(names)) == len(names)
    assert all(point.why for point in ENTRY_POINTS if point.profile is not Profile.PURE)


def test_every_child_process_is_that_of_an_entry_point() -> None:
    children = {
        "relax_events." + path.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", ".")
        for path in PACKAGE.rglob("*.py")
        if "Served()" in path.read_text()
    }
    assert children - {"relax_events.attacks.probe_child"} == {
        point.module for point in ENTRY_POINTS
    }


def test_processes_are_started_by_known_launchers_alone() -> None:
    starting = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if "relax_events/attacks" not in path.as_posix() and _starts_process(path)
    }
    assert starting == set(LAUNCHERS)


def _starts_process(path: Path) -> bool:
    return any(
        isinstance(node, ast.Attribute)
        and node.attr in STARTS
        and isinstance(node.value, ast.Name | ast.Attribute)
        and (
            getattr(node.value, "id", "") == "subprocess"
            or getattr(node.value, "attr", "") == "subprocess"
            or (getattr(node.value, "id", "") == "asyncio" and node.attr.startswith("create_sub"))
        )
        for node in ast.walk(ast.parse(path.read_text()))
    )
