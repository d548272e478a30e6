"""The broker is killed, with all workers and alone."""

from __future__ import annotations

from collections.abc import Callable

from harness import BROKER_SECONDS, EVERYTHING_SECONDS, FaultRun, assert_books_balance


def test_run_ends_by_itself_when_broker_and_workers_are_killed(start_run: Callable[..., FaultRun]) -> None:
    run = start_run(run={"num_steps": 24})
    process = run.start()
    run.until_steps(5)
    killed = run.kill(*run.worker_ids)
    run.broker.kill()
    run.recovers_within(EVERYTHING_SECONDS)
    run.until_ready_again(*run.worker_ids, killed=killed)

    run.broker.kill()
    run.recovers_within(BROKER_SECONDS)
    assert run.state.num_steps < run.config.run.num_steps, "the broker was killed within the run, not after it"

    assert run.until_ended(process) == 0
    assert_books_balance(run)
