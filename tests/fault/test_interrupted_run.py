"""An interrupted run reports it at once, exits with the shell's code for the signal, and includes
all its sessions in the report once it is resumed.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable

import orjson
import pytest
from harness import FaultRun

DRAINING = "draining; press Ctrl-C again to stop at once"


def interrupted(run: FaultRun, number: int, *, after_steps: int, num_answers: int) -> int:
    """Start a run, interrupt it, wait for its answer while it can't drain, and return its exit
    code."""
    process = run.start()
    run.wait_until_steps(after_steps)
    held = run.signal(signal.SIGSTOP, "reward-0")
    process.send_signal(number)
    run.wait_until(
        lambda: run.output.read_text().count(DRAINING) == num_answers,
        "it answers while its workers drain",
    )
    assert process.poll() is None
    os.kill(held["reward-0"], signal.SIGCONT)
    return run.wait_until_ended(process)


@pytest.mark.long
def test_interrupted_run_responds_at_once_and_resumed_session_reports_it_all(
    start_run: Callable[..., FaultRun],
) -> None:
    run = start_run(run={"num_steps": 14})
    assert interrupted(run, signal.SIGINT, after_steps=2, num_answers=1) == 130
    assert interrupted(run, signal.SIGTERM, after_steps=6, num_answers=2) == 143
    assert (
        f"run {run.config.run.id} ended before its goal: interrupted; the same command"
        in run.output.read_text()
    )
    interrupted_at = run.state.num_steps

    process = run.start()
    assert run.wait_until_ended(process) == 0
    report = orjson.loads((run.folder / "report.json").read_bytes())
    assert report["steps"] == 14
    assert report["steps_of_session"] <= 14 - interrupted_at
    assert report["total_seconds"] > report["wall_seconds"]
    resumed = (
        f"{report['steps_of_session']} steps in {report['wall_seconds']:.0f} s since it was resumed"
    )
    closing = rf"in 14 steps, {report['total_seconds']:.0f} s \({resumed}\)"
    assert re.search(closing, run.output.read_text())


@pytest.mark.long
def test_second_relax_run_names_the_process_that_owns_the_run(
    start_run: Callable[..., FaultRun],
) -> None:
    run = start_run(run={"num_steps": 100_000})
    first = run.start()
    run.wait_until_steps(1)
    second = run.start()
    notice = f"another relax run works on this run already (pid {first.pid} on "
    run.wait_until(lambda: notice in run.output.read_text(), "the second one says so")
    for process in (first, second):
        process.send_signal(signal.SIGTERM)
    assert (run.wait_until_ended(first), run.wait_until_ended(second)) == (143, 143)
