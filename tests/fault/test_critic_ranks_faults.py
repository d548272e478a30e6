"""Ranks that hold a critic together, and die: all of them start again from the newest checkpoint."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import FaultRun, assert_ledger_balances

from relax_events.packages.examples.tiny_models import make_tiny

pytestmark = pytest.mark.long
STEPS = 8


def test_critic_learns_on_after_a_rank_of_it_was_killed(
    start_run: Callable[..., FaultRun], tmp_path: Path
) -> None:
    model = make_tiny(tmp_path / "model", corpus=["12=21"], seed=3)  # with two key-value heads
    run = start_run(
        run={"num_steps": STEPS},
        model={"path": str(model)},
        algorithm={"name": "ppo"},
        critic={"ranks": 2, "learning_rate": 1e-2},
        trainer={
            "backend": "megatron",
            "ranks": 2,
            "tensor_parallel": 2,
            "checkpoint_every": 2,
        },
    )
    process = run.start()
    run.wait_until_steps(1)
    run.wait_until(
        lambda: bool(run.logged("critic-0", "checkpoint.written")), "a checkpoint of the critic"
    )
    follower = run.running_workers()["critic-1"].pid
    run.signal_process(signal.SIGKILL, follower)
    assert run.wait_until_ended(process) == 0
    assert_ledger_balances(run)
    assert run.running_workers() == {}
    started = run.logged("critic-0", "worker.started")
    assert len(started) == len(run.logged("critic-1", "worker.started")) == 2
    assert run.logged("critic-0", "checkpoint.loaded")
    learned = run.logged("critic-0", "critic_step.learned")
    steps = [line["train_step"] for line in learned]
    assert steps[0] == 0
    # it learns from a version before it values that version's samples, and need not learn from
    # the newest ones before the run ends
    assert set(steps) >= set(range(STEPS - 1 - run.config.run.max_staleness))
    assert all(line["value_grad_norm"] > 0 for line in learned)
    again = {line["train_step"]: line["value_loss"] for line in learned}
    for line in learned:  # a step that was learned twice
        assert line["value_loss"] == pytest.approx(again[line["train_step"]], rel=1e-3)
