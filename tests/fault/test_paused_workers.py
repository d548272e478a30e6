"""Workers that are suspended and resumed, and a second trainer: no record is duplicated or lost."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
from harness import LIVING_SECONDS, WORKER_SECONDS, FaultRun, assert_ledger_balances

PAUSE_SECONDS = 7.5  # sessions of the run's consumer groups last 3 s, those of its share group 6 s
PAUSED = ("trainer-0", "rollout-0", "advantage-0")


@pytest.mark.long
def test_run_continues_when_workers_pause_longer_than_their_sessions(
    start_run: Callable[..., FaultRun],
) -> None:
    run = start_run(run={"num_steps": 36})
    run.start()
    run.wait_until_steps(3)
    pids = {worker_id: run.pid(worker_id) for worker_id in run.worker_ids}
    for worker_id in PAUSED:
        run.signal(signal.SIGSTOP, worker_id)
        run.follow_for(PAUSE_SECONDS)
        run.signal(signal.SIGCONT, worker_id)
        run.recovers_within(LIVING_SECONDS)
    assert run.state.num_steps < 36
    assert run.wait_until_ended(run.process) == 0
    assert assert_ledger_balances(run)["rollouts_regenerated"] == 0
    assert {worker_id: run.pid(worker_id) for worker_id in run.worker_ids} == pids, (
        "no worker was started again"
    )


def test_trainer_is_fenced_when_a_second_one_takes_over(start_run: Callable[..., FaultRun]) -> None:
    run = start_run(run={"num_steps": 30})
    run.start()
    run.wait_until_steps(3)
    zombie = run.signal(signal.SIGSTOP, "trainer-0")
    second = run.start_worker("trainer", index=0)
    run.recovers_within(WORKER_SECONDS)
    run.wait_until_ready_again("trainer-0", killed=zombie)
    run.signal_process(signal.SIGCONT, zombie["trainer-0"])
    run.wait_until(
        lambda: bool(run.logged("run", "worker.fenced")),
        "the supervisor sees that its trainer was fenced",
    )
    assert [line["pid"] for line in run.logged("run", "worker.fenced")] == [zombie["trainer-0"]]

    assert (run.wait_until_ended(run.process), run.wait_until_ended(second)) == (0, 0)
    spawned = [line["worker_id"] for line in run.logged("run", "worker.spawned")]
    assert spawned.count("trainer-0") == 1, "a third trainer would only have fenced the second"
    assert assert_ledger_balances(run)["rollouts_regenerated"] == 0
