"""Runs with an embedded broker: every client can use it, it never stops under a client, and none is
left running.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from broker_steps import turn_until
from command_line import Relax

from relax_events.kafka.embedded import EmbeddedBroker
from relax_events.runtime.failpoints import VARIABLE

pytestmark = pytest.mark.timeout(600)
RUN_SECONDS = 200.0
END_SECONDS = 200.0
LOOK_SECONDS = 0.2


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[EmbeddedBroker]:
    """Yield the broker of the test's folder, which the test itself never starts."""
    broker = EmbeddedBroker(tmp_path / ".relax" / "broker")
    try:
        yield broker
    finally:
        broker.stop()


@contextmanager
def started(run_file: Path, *overrides: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start `relax run` in the run file's folder, as a shell would."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("RELAX_")
    } | {"OMP_NUM_THREADS": "1", VARIABLE: ""}
    command = [sys.executable, "-m", "relax_events.cli", "run", str(run_file), *overrides]
    with (run_file.parent / "output.log").open("ab") as log:
        process = subprocess.Popen(
            command,
            cwd=run_file.parent,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait(END_SECONDS)


def until_workers_use_it(broker: EmbeddedBroker, process: subprocess.Popen[bytes]) -> None:
    """Wait until workers of a run use the broker next to the run itself."""
    while broker.pid is None or len(broker.users) < 3:
        with suppress(subprocess.TimeoutExpired):
            pytest.fail(f"the run ended early: exit code {process.wait(LOOK_SECONDS)}")


@pytest.mark.long
def test_commands_start_the_stopped_broker_of_a_finished_run(
    relax: Relax, run_file: Path, broker: EmbeddedBroker, run_id: str
) -> None:
    ran = relax("run", run_file, timeout_seconds=RUN_SECONDS)
    assert ran.code == 0, ran.err
    assert not broker.is_running
    checked = relax("ledger", "check", run_file)
    assert (checked.code, "all promises hold" in checked.out) == (0, True), checked.err
    assert "is down; starting it for relax ledger check" in checked.err
    listed = relax("runs", "show")
    assert (listed.code, run_id in listed.out) == (0, True), listed.err
    lag = relax("topics", "show", run_file, "--by", "slot")
    assert (lag.code, "trainer" in lag.out) == (0, True), lag.err
    assert not broker.is_running


@pytest.mark.long
def test_run_that_was_killed_leaves_no_broker(
    relax: Relax, run_file: Path, broker: EmbeddedBroker
) -> None:
    with started(run_file, "run.num_steps=500") as process:
        until_workers_use_it(broker, process)
        process.kill()
    assert broker.wait_for_end(END_SECONDS), "the last worker to drain stops it"
    ran = relax("run", run_file, timeout_seconds=RUN_SECONDS)
    assert ran.code == 0, ran.err
    assert not broker.is_running


@pytest.mark.long
def test_two_runs_in_one_folder_never_stop_the_broker_used_by_the_other(
    run_file: Path, broker: EmbeddedBroker, run_id: str
) -> None:
    with (
        started(run_file) as first,
        started(run_file, f"run.id={run_id}-b", "run.num_steps=6") as second,
    ):
        codes = [process.wait(RUN_SECONDS) for process in (first, second)]
    output = (run_file.parent / "output.log").read_text()
    assert codes == [0, 0], output
    assert "the broker died" not in output
    assert not broker.is_running


@pytest.mark.long
def test_interrupting_twice_leaves_no_broker(run_file: Path, broker: EmbeddedBroker) -> None:
    with started(run_file, "run.num_steps=500") as process:
        until_workers_use_it(broker, process)
        process.send_signal(signal.SIGINT)
        output = run_file.parent / "output.log"
        turn_until(lambda: "press Ctrl-C again" in output.read_text())
        process.send_signal(signal.SIGINT)  # two at once would arrive as one
        assert process.wait(END_SECONDS) == 130
    assert f"relax broker stop --directory {broker.directory}" in output.read_text()
    assert broker.wait_for_end(END_SECONDS)
