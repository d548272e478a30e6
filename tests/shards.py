"""Runs one shard of the long tests within a time limit: `python -m tests.shards 3/10 --seconds
1500`.

The long tests are assigned to shards, longest first, each to the shard with the least total so far,
by the durations in `tests/durations.txt`. The same tests and durations give the same shards. This
module is also a plugin of the pytest that it starts: it selects the tests of its shard, and records
which ran and their results.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
DURATIONS = TESTS / "durations.txt"
DEFAULT_SECONDS = 90.0
"""Of a test that the file does not name."""
KEPT_TOGETHER = ("tests/engines/", "tests/integration/test_apicurio.py")
"""Files whose tests share a server that takes long to start."""
IS_LONG = re.compile(r"\bmark\.long\b")
SHARD, NOTES = "LONG_TESTS_SHARD", "LONG_TESTS_NOTES"
END_SECONDS = 60.0
"""In which a session that ran out of its time may end what its tests started."""


def durations_in(text: str) -> dict[str, float]:
    """Read lines of seconds and a test, or a file for each of its tests; `#` begins a comment."""
    lines = (
        line.split(maxsplit=1)
        for line in text.splitlines()
        if line.strip() and not line.startswith("#")
    )
    return {name: float(seconds) for seconds, name in lines}


def seconds_of(name: str, durations: Mapping[str, float]) -> float:
    """Return how long a test takes: by its own name, its name without parameters, its file."""
    known = (
        durations[key]
        for key in (name, name.partition("[")[0], name.partition("::")[0])
        if key in durations
    )
    return next(known, DEFAULT_SECONDS)


def shards_of(names: Iterable[str], count: int, durations: Mapping[str, float]) -> list[list[str]]:
    """Deal tests out to `count` shards of about the same length; each is in exactly one."""
    together: dict[str, list[str]] = {}
    for name in sorted(names):
        file = name.partition("::")[0]
        together.setdefault(file if name.startswith(KEPT_TOGETHER) else name, []).append(name)
    lengths = {
        unit: sum(seconds_of(name, durations) for name in members)
        for unit, members in together.items()
    }
    shards: list[list[str]] = [[] for _ in range(count)]
    totals = [0.0] * count
    for unit in sorted(lengths, key=lambda unit: (-lengths[unit], unit)):
        least = totals.index(min(totals))
        shards[least] += together[unit]
        totals[least] += lengths[unit]
    return shards


def shard_named(text: str) -> tuple[int, int]:
    """Read `k/N`, where k is from 1 to N.

    Raises:
        ValueError: It is not of that form.
    """
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise ValueError(f"a shard is k/N with k from 1 to N, got {text!r}")
    return int(number), int(count)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the tests of the shard, and note their names."""
    number, count = shard_named(os.environ[SHARD])
    chosen = set(
        shards_of((item.nodeid for item in items), count, durations_in(DURATIONS.read_text()))[
            number - 1
        ]
    )
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in chosen])
    items[:] = [item for item in items if item.nodeid in chosen]
    if os.environ.get("PYTEST_XDIST_WORKER", "gw0") == "gw0":
        note("chosen", *sorted(chosen))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Record a test's result in the process that collects all reports."""
    if "PYTEST_XDIST_WORKER" not in os.environ and (report.failed or report.when == "teardown"):
        note("failed" if report.failed else "done", report.nodeid.partition("@")[0])


def note(what: str, *names: str) -> None:
    """Add to the notes of the session."""
    with Path(os.environ[NOTES]).open("a") as notes:
        notes.writelines(f"{what} {name}\n" for name in names)


def verdict(notes: str) -> tuple[int, list[str]]:
    """Return the exit status of a session that ran out of its time, and the tests that did not run
    to their end."""
    said: dict[str, set[str]] = {"chosen": set(), "failed": set(), "done": set()}
    for line in notes.splitlines():
        what, _, name = line.partition(" ")
        said[what].add(name)
    return int(bool(said["failed"])), sorted(said["chosen"] - said["failed"] - said["done"])


def long_files() -> list[str]:
    """Return the files that hold long tests."""
    return sorted(
        str(path.relative_to(TESTS.parent))
        for path in TESTS.rglob("test_*.py")
        if IS_LONG.search(path.read_text())
    )


def run(shard: str, *, seconds: float, more: Sequence[str] = ()) -> int:
    """Run a shard's tests two at a time; where the time runs out, name what did not run, and fail
    only if a test failed."""
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder) / "notes"
        notes.touch()
        served = ("--dist", "loadfile", "--no-loadscope-reorder", "--leftovers=report")
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-n",
            "2",
            "-m",
            "long",
            *served,
            "-p",
            "tests.shards",
            *more,
            *long_files(),
        ]
        environment = {**os.environ, SHARD: shard, NOTES: str(notes)}
        session = subprocess.Popen(
            command, cwd=TESTS.parent, env=environment, start_new_session=True
        )
        try:
            status = session.wait(seconds)
        except subprocess.TimeoutExpired:
            end(session)
            status, missing = verdict(notes.read_text())
            print(
                f"shard {shard} is not finished: its {seconds:.0f} s are over, and these "
                "tests did not run to their end:"
            )
            print(
                *(f"  {name}" for name in missing or ["(all: they were still being collected)"]),
                sep="\n",
                flush=True,
            )
    return 0 if status == pytest.ExitCode.NO_TESTS_COLLECTED else status


def end(session: subprocess.Popen[bytes]) -> None:
    """Interrupt a session, so that its fixtures end what they started; kill it when it takes too
    long."""
    session.send_signal(signal.SIGINT)
    try:
        session.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(session.pid, signal.SIGKILL)
        session.wait()


def main() -> int:
    """Run the shard that the command line names."""
    parser = argparse.ArgumentParser(description="Run one shard of the long tests.")
    parser.add_argument(
        "shard", help="k/N, k from 1 to N", type=lambda text: "/".join(map(str, shard_named(text)))
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=3600.0,
        help="when to end; by then a test that did not run fails nothing",
    )
    given, more = parser.parse_known_args()
    return run(given.shard, seconds=given.seconds, more=more)


if __name__ == "__main__":
    sys.exit(main())
