"""Inputs that once broke a decoder: each is accepted, or rejected with one of our errors. New ones
come from `make fuzz`.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import strategies as st

from tests.fuzz import driver
from tests.fuzz.driver import EXAMPLES, run_target
from tests.fuzz.target import SCRATCH, Target
from tests.fuzz.targets import TARGETS


@pytest.fixture(scope="module", autouse=True)
def _scratch_goes() -> Iterator[None]:
    yield
    shutil.rmtree(SCRATCH, ignore_errors=True)


FILES = sorted(EXAMPLES.rglob("*.bin"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_recorded_crash_input_passes_its_fuzz_target(file: Path) -> None:
    TARGETS[file.parent.name].check(file.read_bytes())


def test_every_example_belongs_to_a_target() -> None:
    assert {file.parent.name for file in FILES} <= set(TARGETS)


def raising(data: bytes) -> None:
    if b"x" in data:
        raise KeyError(data)


def ending(data: bytes) -> None:
    if b"x" in data:
        os.kill(os.getpid(), signal.SIGKILL)


def unending(data: bytes) -> None:
    while b"x" in data:
        pass


@pytest.mark.parametrize(
    ("check", "what"),
    [(raising, "KeyError at "), (ending, "ended with -9"), (unending, "no end within ")],
)
def test_fuzzing_keeps_an_input_that_raises_crashes_or_hangs(
    check: object, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "EXAMPLES", tmp_path)
    monkeypatch.setattr(driver, "HANG_SECONDS", 3.0)
    target = Target("made-up", st.sampled_from([b"a", b"bx", b"x"]), check)  # type: ignore[arg-type]
    report = run_target(target, seconds=1.0, seed=1)
    ((found, file),) = report.crashes.items()
    assert found.startswith(what)
    assert b"x" in Path(file).read_bytes()
    assert report.executions >= 1
