"""A sync run that computes samples one at a time is reproducible bit for bit, also when its trainer
dies: recorded batches are trained again from the log.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from harness import WORKER_SECONDS, FaultRun, assert_ledger_balances

STEPS = 14
SYNC: dict[str, Any] = {
    "run": {"num_steps": STEPS, "mode": "sync", "max_staleness": 0, "seed": 7},
    "engine": {"max_running_samples": 1},
    "trainer": {"max_tokens_per_micro_batch": 1},
}
"""No sample shares a computation with another one, so whatever order records arrive in, every run
repeats the same ones."""


@pytest.mark.long
def test_sync_run_is_bitwise_reproducible_when_the_trainer_is_killed(
    start_run: Callable[..., FaultRun],
) -> None:
    first, second = (undisturbed(start_run(**SYNC)) for _ in range(2))
    assert curves(second) == curves(first)

    run = start_run(**SYNC)
    process = run.start()
    for steps in (3, 8):  # before the first checkpoint, and between two
        run.wait_until_steps(steps)
        killed = run.kill("trainer-0")
        run.recovers_within(WORKER_SECONDS)
        run.wait_until_ready_again("trainer-0", killed=killed)
    assert run.state.num_steps < STEPS
    assert run.wait_until_ended(process) == 0
    assert assert_ledger_balances(run)["rollouts_regenerated"] == 0
    replays = run.logged("trainer-0", "train_steps.replayed")
    assert len(replays) == 2
    assert all(line["identical"] and line["num_steps"] > 0 for line in replays)
    assert curves(run.report()) == curves(first)


def undisturbed(run: FaultRun) -> dict[str, Any]:
    """Run to the end; return the report."""
    assert run.wait_until_ended(run.start()) == 0
    assert_ledger_balances(run)
    return run.report()


def curves(report: dict[str, Any]) -> dict[str, Any]:
    """Return what must be equal to the last bit."""
    timed = {"step_seconds", "tokens_per_second", "phase_seconds"}
    return {
        "weights": report["weights_digests"],
        **{name: values for name, values in report["curves"].items() if name not in timed},
    }
