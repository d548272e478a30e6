"""Failpoints fire once in a run, at the requested pass; invalid settings are rejected; every
declared failpoint exists in the code.
"""

from __future__ import annotations

import ast
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from relax_events.errors import ConfigError
from relax_events.runtime.failpoints import (
    PER_SAMPLE_ROLES,
    POINTS,
    SAMPLE_LOOP_POINTS,
    Failpoints,
    parse_failpoints,
)

ROOT = Path(__file__).parents[2]
PROGRAM = """
import os, pathlib, sys
from relax_events.runtime.failpoints import arm_failpoints, failpoint
arm_failpoints(pathlib.Path(), os.environ)
for number in range(4):
    print(number, file=sys.stderr)
    failpoint("metrics.before_write")
"""


def run_program(folder: Path, armed: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=folder,
        env={"RELAX_FAILPOINTS": armed, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_failpoint_kills_at_the_given_pass_only_once_per_run(tmp_path: Path) -> None:
    first, second, third = (
        run_program(tmp_path, armed)
        for armed in ("metrics.before_write:3=kill",) * 2 + ("metrics.before_write=kill",)
    )
    assert (first.returncode, first.stderr.split()) == (-signal.SIGKILL, ["0", "1", "2"])
    assert (second.returncode, second.stderr.split()) == (0, ["0", "1", "2", "3"]), (
        "started again, it gets through"
    )
    assert (third.returncode, third.stderr.split()) == (-signal.SIGKILL, ["0"]), (
        "another pass is another point"
    )
    assert {path.name for path in (tmp_path / "failpoints").iterdir()} == {
        "metrics.before_write:3",
        "metrics.before_write:1",
    }


def test_no_failpoint_files_are_written_when_none_is_armed(tmp_path: Path) -> None:
    assert run_program(tmp_path, "").returncode == 0
    assert list(tmp_path.iterdir()) == []


def test_failpoint_that_is_not_armed_has_no_effect(tmp_path: Path) -> None:
    failpoints = Failpoints()
    failpoints.arm("trainer.after_commit=kill", folder=tmp_path)
    failpoints.reach("trainer.after_weights")
    assert list(tmp_path.iterdir()) == []


def test_variable_is_parsed_into_failpoints_passes_and_actions() -> None:
    points = parse_failpoints("reward.before_commit:3=kill, trainer.in_transaction=stop,")
    assert [(point.mark_name, point.action) for point in points] == [
        ("reward.before_commit:3", "kill"),
        ("trainer.in_transaction:1", "stop"),
    ]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (
            "reward.before_comit=kill",
            "there is no point 'reward.before_comit'; did you mean reward.before_commit",
        ),
        (
            "nothing-like-it=kill",
            "there is no point 'nothing-like-it'; there are prompter.after_claim, ",
        ),
        (
            "reward.before_commit=nap",
            "the action at reward.before_commit must be kill or stop, got 'nap'",
        ),
        (
            "reward.before_commit:0=kill",
            (
                "'reward.before_commit:0=kill' is not of the form name=action or name:n=action "
                "with n >= 1"
            ),
        ),
        ("reward.before_commit", "'reward.before_commit' is not of the form"),
    ],
)
def test_invalid_failpoint_setting_is_rejected_with_a_correction(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match="RELAX_FAILPOINTS: ") as refused:
        parse_failpoints(text)
    assert complaint in str(refused.value)


def test_fault_injection_guide_names_existing_failpoints_and_tests() -> None:
    page = (ROOT / "docs/how-to/fault-injection.md").read_text()
    examples = re.findall(r'RELAX_FAILPOINTS="([^"]+)"', page)
    assert [len(parse_failpoints(example)) for example in examples] == [2]
    named = set(re.findall(r"test_\w+\.py", page))
    assert named
    assert named <= {path.name for path in (ROOT / "tests/fault").glob("test_*.py")}


def passed_points() -> Iterator[str]:
    """Yield the failpoints in the code; those of sample roles are listed once for all roles."""
    for path in (*(ROOT / "relax_events").rglob("*.py"), *(ROOT / "workers").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id == "failpoint"
            ):
                (argument,) = node.args
                if isinstance(argument, ast.Constant):
                    yield str(argument.value)
                else:
                    assert isinstance(argument, ast.JoinedStr)
                    assert isinstance(argument.values[-1], ast.Constant)
                    yield from (f"{role}{argument.values[-1].value}" for role in PER_SAMPLE_ROLES)


def test_every_declared_failpoint_occurs_once_in_the_code() -> None:
    assert sorted(passed_points()) == sorted(POINTS)
    assert set(SAMPLE_LOOP_POINTS) < {name.partition(".")[2] for name in POINTS}
