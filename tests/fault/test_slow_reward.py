"""A reward function hangs on one sample, longer than any timeout: the sample is refused and counted,
and the run continues.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from harness import WORKER_SECONDS, FaultRun, assert_ledger_balances

from relax_events.events.codec import EventCodec
from relax_events.events.sample_columns import split_samples
from relax_events.events.types import SampleScored

# a member that did not look after its session for so long would have lost its partitions: they last
# 3 s
TIMEOUT_SECONDS = 4.0


@pytest.mark.long
def test_hanging_reward_function_costs_only_one_sample(
    start_run: Callable[..., FaultRun], directory: Path
) -> None:
    run = start_run(
        run={"num_steps": 8},
        reward={
            "function": f"{directory / 'reward.py'}:hang_once",
            "timeout_seconds": TIMEOUT_SECONDS,
        },
    )
    run.start()
    run.wait_until(lambda: bool(list(run.folder.glob("hangs"))), "the reward function hangs")
    run.recovers_within(WORKER_SECONDS)

    assert run.wait_until_ended(run.process) == 0
    ledger = assert_ledger_balances(run)
    assert (ledger["outcomes"]["failed"], ledger["samples_by_outcome"]["refused"]) == (0, 1)
    scores = run.records("reward.scores", num_partitions=run.plan.num_sample_partitions)
    errors = {
        event.error
        for record in scores
        for event in split_samples(EventCodec().decode(record.value))
        if isinstance(event, SampleScored) and event.error is not None
    }
    assert len(errors) == 1
    assert f"took longer than {TIMEOUT_SECONDS:g} s (reward.timeout_seconds)" in errors.pop()
    assert len(run.logged("reward-0", "worker.started")) == 1
    assert not run.logged("reward-0", "partitions.lost")


@pytest.mark.long
def test_prompt_whose_samples_hang_the_verifier_fails_without_ending_the_run(
    start_run: Callable[..., FaultRun], directory: Path
) -> None:
    """Its verdicts together take longer than a worker may be silent; each alone does not."""
    reward = {
        "function": f"{directory / 'reward.py'}:hang_on_milk",
        "timeout_seconds": 2.0,
        "processes": 1,
    }
    workers = {"heartbeat_seconds": 0.2, "heartbeat_timeout_seconds": 10.0}
    health = {"backoff_seconds": 0.5, "max_restarts": 1, "max_pipeline_restarts": 0}
    sections = {
        "run": {"num_steps": 2, "samples_per_prompt": 8},
        "algorithm": {"kl_coefficient": 0.0, "old_logprobs": "rollout"},
    }
    run = start_run(**sections, reward=reward, workers=workers, health=health)
    run.start()
    assert run.wait_until_ended(run.process) == 0
    assert assert_ledger_balances(run)["outcomes"]["failed"] >= 1
    assert [line["worker_id"] for line in run.logged("run", "worker.spawned")].count(
        "reward-0"
    ) == 1
