"""Every role is killed in turn within one run, and before them the fork server."""

from __future__ import annotations

from collections.abc import Callable

import psutil
from harness import WORKER_SECONDS, FaultRun, assert_ledger_balances

# Without one of these the run stalls within a few steps, so tests can wait for its restart; metrics
# and controller are needed only at the end.
NEEDED = (
    "prompter-0",
    "rollout-0",
    "reward-0",
    "reference-0",
    "actor-forward-0",
    "advantage-0",
    "trainer-0",
)
MISSED_LATER = ("metrics-0", "controller-0")


def test_run_finishes_when_the_fork_server_and_then_every_role_are_killed(
    start_run: Callable[..., FaultRun],
) -> None:
    run = start_run(run={"num_steps": 44})
    assert sorted(run.worker_ids) == sorted(NEEDED + MISSED_LATER)
    process = run.start()
    run.wait_until_steps(2)
    starter = psutil.Process(run.pid("trainer-0")).parent()
    assert starter is not None
    assert "relax_events.launcher.fork_server" in starter.cmdline()
    starter.kill()
    killed = run.kill(*MISSED_LATER)
    for worker_id in NEEDED:
        killed |= run.kill(worker_id)
        run.recovers_within(WORKER_SECONDS)
        run.wait_until_ready_again(worker_id, killed=killed)
    run.wait_until_ready_again(*run.worker_ids, killed=killed)
    assert run.state.num_steps < run.config.run.num_steps, (
        "everything was killed within the run, not after it"
    )
    served = run.metrics("controller-0")
    assert served["relax_train_steps_total"] >= len(NEEDED), (
        "the controller that came after knows the run from its log"
    )
    assert sum(
        value
        for sample, value in served.items()
        if sample.startswith("relax_workers{") and "silent" not in sample
    ) == len(run.worker_ids)

    assert run.wait_until_ended(process) == 0
    assert_ledger_balances(run)
    assert run.worker_processes() == []
