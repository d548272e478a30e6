"""`relax run` itself is killed: its workers exit, and the same command resumes the run."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
from harness import EVERYTHING_SECONDS, FaultRun, assert_ledger_balances


def test_run_is_resumed_by_the_same_command_when_relax_run_is_killed(
    start_run: Callable[..., FaultRun],
) -> None:
    run = start_run(run={"num_steps": 20})
    first = run.start()
    run.wait_until_steps(4)
    workers = run.worker_processes()
    assert len(workers) == len(run.worker_ids)
    first.kill()
    run.wait_until_gone(workers)
    assert 4 <= run.state.num_steps < 20

    second = run.start()
    run.recovers_within(EVERYTHING_SECONDS)
    assert run.wait_until_ended(second) == 0
    ledger = assert_ledger_balances(run)
    assert ledger["rollouts_regenerated"] == 0, (
        "the workers drained: what they held was finished or given back"
    )


@pytest.mark.long
def test_two_launchers_of_one_run_do_its_work_once(start_run: Callable[..., FaultRun]) -> None:
    """The trainer of the first one is stopped until that of the second one trains, so that the run
    can't be over before both work on it."""
    run = start_run(run={"num_steps": 16})
    first = run.start()
    run.wait_until_steps(3)
    stopped = run.signal(signal.SIGSTOP, "trainer-0")
    second = run.start()
    run.wait_until(
        lambda: all(
            run.is_ready(worker_id) and run.pid(worker_id) != before
            for worker_id, before in stopped.items()
        ),
        "the second trainer has taken over",
    )
    run.signal_process(signal.SIGCONT, stopped["trainer-0"])
    assert [run.wait_until_ended(process) for process in (first, second)] == [0, 0]
    assert "another relax run works on this run already" in run.output.read_text()
    ledger = assert_ledger_balances(run)
    num_samples_of_step = run.config.run.prompts_per_step * run.config.run.samples_per_prompt
    assert ledger["rollouts_regenerated"] <= num_samples_of_step, (
        "a prompter that is replaced between its look and its write repeats that write at most"
    )
