"""A second rollout worker joins a run, gets leases at once, and leaves without losing a sample."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
from harness import FaultRun, assert_ledger_balances

from relax_events.events.parts import now_micros

STEPS = 32


@pytest.mark.long
def test_second_rollout_worker_starts_work_in_five_seconds_and_finishes_it(
    start_run: Callable[..., FaultRun],
) -> None:
    run = start_run(run={"num_steps": STEPS})
    run.start()
    run.wait_until_steps(2)
    run.signal(
        signal.SIGSTOP, "trainer-0"
    )  # so that there is work left, however long the second worker takes to start
    started_at = now_micros()
    second = run.start_worker("rollout", index=1)
    run.wait_until(lambda: run.is_ready("rollout-1"), "the second rollout worker is ready")
    ready_at = now_micros()
    run.signal(signal.SIGCONT, "trainer-0")
    run.wait_until(lambda: run.num_taken("rollout-1") > 0, "it has taken prompt groups")
    working_at = run.state.workers["rollout-1"].sent_at
    print(
        f"ready {(ready_at - started_at) / 1e6:.1f} s after the start of the process, at "
        f"work {(working_at - ready_at) / 1e6:.2f} s later"
    )
    assert working_at - ready_at < 5_000_000 * run.slowness()
    run.wait_until(
        lambda: run.state.workers["rollout-1"].num_processed > 0, "it has written samples"
    )

    run.signal(
        signal.SIGSTOP, "trainer-0"
    )  # so that the run is not over before the worker has left
    second.send_signal(signal.SIGTERM)
    assert run.wait_until_ended(second) == 0
    assert run.state.num_steps < STEPS
    run.signal(signal.SIGCONT, "trainer-0")
    assert run.wait_until_ended(run.process) == 0
    ledger = assert_ledger_balances(run)
    assert (
        ledger["rollouts_regenerated"],
        ledger["outcomes"]["expired"],
        ledger["outcomes"]["failed"],
    ) == (0, 0, 0)
