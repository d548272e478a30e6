"""Runs whose samples have stateful environments, with a kill in the middle of sessions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from harness import FaultRun, assert_ledger_balances, assert_spent_attempts_are_not_scored

pytestmark = pytest.mark.long

ENVIRONMENT = """
import os, time


class Counting:
    def reset(self, *, seed=None, options=None):
        self.count = 0
        return f"begin {seed}", {}

    def step(self, action):
        self.count += 1
        time.sleep(0.05)
        return f"{self.count}", 0.5 * self.count, self.count == 2, False, {}


class Failing(Counting):
    def reset(self, *, seed=None, options=None):
        self.fails = seed % 3 == 0
        return super().reset(seed=seed)

    def step(self, action):
        if self.fails:
            raise ConnectionError("the simulator is gone")
        return super().step(action)
"""
CHILD = "relax_events.environments.session_child"
SETTINGS = {
    "algorithm": {"kl_coefficient": 0.0, "old_logprobs": "rollout"},
    "reward": {"function": "environment"},
    "engine": {"max_context_tokens": 256, "sampling": {"max_new_tokens": 64}},
}


def environment_of(folder: Path, name: str, **settings: object) -> dict[str, object]:
    file = folder / "environment.py"
    file.write_text(ENVIRONMENT)
    return {"interface": "gymnasium", "function": f"{file}:{name}", **settings}


def children_of(worker: int) -> list[psutil.Process]:
    """Return the children of a worker that hold sessions."""
    return [one for one in psutil.Process(worker).children() if CHILD in one.cmdline()]


def test_killed_rollout_worker_begins_its_sessions_again_and_trains_each_once(
    start_run: Callable[..., FaultRun], tmp_path: Path
) -> None:
    run = start_run(
        run={"num_steps": 6, "prompts_per_step": 4},
        environment=environment_of(tmp_path, "Counting"),
        **SETTINGS,
    )
    process = run.start()
    run.wait_until_steps(1)
    children = children_of(run.pid("rollout-0"))
    assert children
    killed = run.kill("rollout-0")
    run.wait_until(
        lambda: not any(one.is_running() for one in children),
        "the killed worker's environments are gone",
    )
    run.wait_until_ready_again("rollout-0", killed=killed)
    assert run.wait_until_ended(process) == 0
    assert_ledger_balances(run)
    samples = run.samples()
    for sample in samples:
        turns = [turn for turn in sample.turns if turn.role == "assistant"]
        assert sample.environment_rewards is not None
        assert sample.environment_rewards.shape == (len(turns),)
        assert sample.messages[-1].text.startswith("begin ")
    given = [list(sample.environment_rewards) for sample in samples]
    assert [0.5, 1.0] in given, "no turn ended by itself"


def test_sessions_with_spent_attempts_become_dead_letters_and_no_rewards(
    start_run: Callable[..., FaultRun], tmp_path: Path
) -> None:
    run = start_run(
        run={"num_steps": 3, "prompts_per_step": 4, "max_failed_prompt_groups": 1000},
        environment=environment_of(tmp_path, "Failing", attempts=2),
        **SETTINGS,
    )
    assert run.wait_until_ended(run.start()) == 0
    assert_ledger_balances(run)
    assert_spent_attempts_are_not_scored(run, "ConnectionError: the simulator is gone")
