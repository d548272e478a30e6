"""PPO through the command line: a critic that learns from the run's own log returns values, and a
replay trains on the recorded values.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import orjson
import pytest
from command_line import (
    FinishedRun,
    Relax,
    log_of,
    report_of,
    run_on_policy,
    sample_events,
)

from relax_events.algorithms.gae import GroupValues, gae_advantages
from relax_events.events.types import SampleEvaluated, SampleReady

pytestmark = pytest.mark.timeout(300)
PPO = """
[algorithm]
name = "ppo"

[critic]
learning_rate = 1e-2
warmup_steps = 1
"""


@pytest.fixture(scope="module")
def ppo_run(
    prepared: Path, bootstrap_servers: str, tmp_path_factory: pytest.TempPathFactory
) -> FinishedRun:
    """Return a finished run of three steps, strictly on-policy."""
    folder = tmp_path_factory.mktemp("ppo")
    return run_on_policy(prepared, folder, bootstrap_servers, PPO)


def test_critic_version_equals_the_policy_version_that_it_scores(ppo_run: FinishedRun) -> None:
    folder, run_id = ppo_run.run_file.parent, ppo_run.config.run.id
    report = report_of(folder, run_id)
    assert report["succeeded"]
    assert (report["samples_lost"], report["samples_trained_twice"], report["ledger_problems"]) == (
        0,
        0,
        [],
    )
    evaluated = [
        event
        for event in sample_events(ppo_run, "critic.values")
        if isinstance(event, SampleEvaluated)
    ]
    assert len(evaluated) == 3 * 16
    assert {
        (event.model_role, event.policy_version - event.model_version) for event in evaluated
    } == {("critic", 0)}
    assert all(np.any(event.values) == (event.policy_version > 0) for event in evaluated)
    learned = [
        line
        for line in log_of(folder, run_id, "critic-0")
        if line["event"] == "critic_step.learned"
    ]
    assert [line["train_step"] for line in learned][:2] == [0, 1]
    assert all(line["critic_version_lag"] == 0 for line in learned)
    lines = [
        orjson.loads(line)
        for line in (ppo_run.config.run_directory / "metrics.jsonl").read_bytes().splitlines()
    ]
    assert {line["policy_version"] for line in lines if "value_loss" in line} >= {1, 2}


def test_advantages_are_computed_from_the_recorded_critic_values(ppo_run: FinishedRun) -> None:
    values = {
        event.sample_id: event.values
        for event in sample_events(ppo_run, "critic.values")
        if isinstance(event, SampleEvaluated)
    }
    ready = [
        event
        for event in sample_events(ppo_run, "advantage.samples")
        if isinstance(event, SampleReady)
    ]
    assert len(ready) == 3 * 16
    for sample in ready:
        mask = np.asarray(sample.loss_mask, bool)
        np.testing.assert_array_equal(np.asarray(sample.values), values[sample.sample_id])
        rewards = np.zeros((1, mask.sum()))
        rewards[0, -1] = sample.reward
        given = gae_advantages(
            GroupValues(rewards, np.asarray(sample.values, np.float64)[None, mask]),
            gamma=1.0,
            gae_lambda=0.95,
        )
        np.testing.assert_allclose(np.asarray(sample.advantages)[mask], given[0], rtol=1e-6)


def test_policy_is_not_trained_during_critic_warmup(ppo_run: FinishedRun) -> None:
    folder, run_id = ppo_run.run_file.parent, ppo_run.config.run.id
    report = report_of(folder, run_id)
    rates, digests = report["curves"]["learning_rate"], report["weights_digests"]
    assert rates == [None, 1e-3, 1e-3]
    assert (report["updates_held"], report["updates_skipped"]) == (1, 0)
    assert report["samples_trained"] == 3 * 16
    assert len(set(digests)) == len(digests) == 3
    held = [line for line in log_of(folder, run_id, "trainer-0") if line["event"] == "update.held"]
    assert [(line["train_step"], line["until_step"]) for line in held] == [(0, 1)]


@pytest.mark.long
def test_replay_of_a_fork_holds_the_steps_that_the_fork_held(
    relax: Relax, ppo_run: FinishedRun, run_id: str, tmp_path: Path, replay_options: tuple[str, ...]
) -> None:
    source, fork = ppo_run.config.run.id, f"{run_id}-fork"
    forked = relax(
        *("runs", "fork", source, fork, "--at-version", "1", *replay_options), timeout_seconds=300
    )
    assert forked.code == 0, forked.err
    report = report_of(tmp_path, fork)
    assert report["curves"]["learning_rate"] == [None, 1e-3]
    verified = relax(
        *("runs", "replay", fork, f"{run_id}-same", "--verify", *replay_options),
        timeout_seconds=300,
    )
    assert verified.code == 0, verified.err
    same = report_of(tmp_path, f"{run_id}-same")
    assert same["weights_digests"] == report["weights_digests"]


@pytest.mark.long
def test_replay_needs_no_critic_where_values_were_recorded(
    relax: Relax,
    ppo_run: FinishedRun,
    finished_run: FinishedRun,
    run_id: str,
    tmp_path: Path,
    replay_options: tuple[str, ...],
) -> None:
    source = ppo_run.config.run.id
    verified = relax(
        "runs", "replay", source, f"{run_id}-same", "--verify", *replay_options, timeout_seconds=200
    )
    assert verified.code == 0, verified.err
    other = relax(
        "runs",
        "replay",
        source,
        f"{run_id}-other",
        "algorithm.gae_lambda=0.5",
        *replay_options,
        timeout_seconds=200,
    )
    assert other.code == 0, other.err
    first, second = (report_of(tmp_path, f"{run_id}-{name}") for name in ("same", "other"))
    assert first["weights_digests"] == report_of(ppo_run.run_file.parent, source)["weights_digests"]
    assert first["curves"]["grad_norm"] != second["curves"]["grad_norm"]
    refused = relax(
        "runs",
        "replay",
        finished_run.config.run.id,
        f"{run_id}-none",
        "algorithm.name=ppo",
        *replay_options,
        timeout_seconds=200,
    )
    assert refused.code != 0
    assert "lacks the critic's values" in refused.err
