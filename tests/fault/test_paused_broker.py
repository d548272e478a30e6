"""The broker is suspended for longer than the session timeout and resumed: each client's pending
records are delivered once.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from harness import BROKER_SECONDS, FaultRun, assert_ledger_balances
from soak_faults import paused

PAUSE_SECONDS = 8.0


@pytest.mark.long
def test_run_continues_when_the_broker_pauses_longer_than_sessions_last(
    start_run: Callable[..., FaultRun],
) -> None:
    run = start_run(run={"num_steps": 24})
    run.start()
    run.wait_until_steps(4)
    pid = run.broker.pid
    assert pid is not None
    with paused(pid):
        before = run.state.num_steps
        run.follow_for(PAUSE_SECONDS)
        assert run.state.num_steps <= before + 1, (
            "nothing is committed without a broker, but what was being read"
        )
    print(f"recovered in {run.recovers_within(BROKER_SECONDS):.1f} s")
    assert run.state.num_steps < run.config.run.num_steps, "it paused within the run, not after it"

    assert run.wait_until_ended(run.process) == 0
    assert_ledger_balances(run)
    assert run.broker.pid == pid, "it was not taken for dead"
