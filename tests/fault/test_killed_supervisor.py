"""`relax run` itself is killed: its workers exit, and the same command resumes the run."""

from __future__ import annotations

from collections.abc import Callable

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
