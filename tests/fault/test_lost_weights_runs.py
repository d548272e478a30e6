"""The newest version's weights are lost in the store: the trainer writes them again, waiting roles
are restarted once, and the run reaches its goal.
"""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable

import pytest
from harness import FaultRun, assert_ledger_balances


@pytest.mark.long
def test_run_continues_when_the_newest_weights_are_lost(start_run: Callable[..., FaultRun]) -> None:
    run = start_run(run={"num_steps": 12}, algorithm={"old_logprobs": "actor"})
    run.start()
    run.wait_until_steps(3)
    run.signal(signal.SIGSTOP, "actor-forward-0")
    run.follow_for(1.5)
    lost = run.state.policy_version
    shutil.rmtree(run.folder / "objects" / "weights" / f"{lost:08d}")
    run.wait_until_ready_again(
        "actor-forward-0", "trainer-0", killed=run.kill("actor-forward-0", "trainer-0")
    )
    assert run.wait_until_ended(run.process) == 0
    assert_ledger_balances(run)
    restored = run.logged("trainer-0", "weights.restored")
    assert [(line["policy_version"], line["is_same"]) for line in restored] == [(lost, True)]
    assert len(run.logged("actor-forward-0", "worker.started")) == 2, (
        "it was killed once, and ended by itself never"
    )
