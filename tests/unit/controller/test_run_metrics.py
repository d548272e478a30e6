"""Prometheus metrics of the whole run, from control logs written by hand."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from event_samples import committed, ended, published
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from relax_events.config import RunConfig
from relax_events.controller.metrics import RunMetrics
from relax_events.events.parts import CheckpointRef, Command, Outcome, WorkerState, now_micros
from relax_events.events.types import Event, PolicyEvaluated, RunCommanded, WorkerHeartbeat
from relax_events.projections.run_state import RunState

MakeRunConfig = Callable[..., RunConfig]
Labels = tuple[tuple[str, str], ...]


def served(config: RunConfig, *events: Event) -> dict[str, dict[Labels, float]]:
    """Note the events and read back the served text: values by sample name and labels."""
    state, registry = RunState(), CollectorRegistry()
    registry.register(RunMetrics(config, state))
    for event in events:
        state.apply(event)
    found: dict[str, dict[Labels, float]] = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


def make_heartbeat(
    worker_id: str, state: WorkerState, *, seconds_ago: float = 0.0, policy_version: int = -1
) -> WorkerHeartbeat:
    role = worker_id.rsplit("-", 1)[0]
    at = now_micros() - int(seconds_ago * 1e6)
    values = {"num_processed": 0, "num_in_flight": 0, "last_progress_at": at, "sent_at": at}
    return WorkerHeartbeat(
        worker_id=worker_id,
        role=role,
        host="h",
        pid=1,
        state=state,
        policy_version=policy_version,
        **values,
    )


def test_newest_train_step_is_exported_with_metrics_and_phases(
    make_run_config: MakeRunConfig,
) -> None:
    config = make_run_config(run={"num_steps": 7, "max_staleness": 3})
    older = committed(0, metrics={"reward_mean": 0.1, "grad_norm": 9.0})
    newest = committed(
        1,
        metrics={"reward_mean": 0.75},
        staleness_counts=[4, 0, 2, 0],
        phase_seconds={"wait": 1.5, "forward": 0.5},
        committed_at=12_500_000,
    )
    found = served(config, published(0), older, published(1), newest, published(2))
    assert found["relax_train_steps_total"] == {(): 2}
    assert (found["relax_train_steps_target"], found["relax_staleness_bound_versions"]) == (
        {(): 7},
        {(): 3},
    )
    assert found["relax_train_step_metric"] == {(("metric", "reward_mean"),): 0.75}
    assert found["relax_train_step_phase_seconds"] == {
        (("phase", "forward"),): 0.5,
        (("phase", "wait"),): 1.5,
    }
    assert found["relax_staleness_max_versions"] == {(): 2}
    assert found["relax_train_step_timestamp_seconds"] == {(): 12.5}
    assert found["relax_published_policy_version"] == {(): 2}


def test_unknown_metrics_have_no_exported_value(make_run_config: MakeRunConfig) -> None:
    found = served(make_run_config())
    assert "relax_train_step_timestamp_seconds" not in found
    assert "relax_staleness_max_versions" not in found
    assert "relax_evaluation_reward_mean" not in found
    assert (found["relax_train_steps_total"], found["relax_published_policy_version"]) == (
        {(): 0},
        {(): -1},
    )


def test_nan_and_infinite_metrics_are_exported_unchanged(make_run_config: MakeRunConfig) -> None:
    found = served(
        make_run_config(), committed(0, metrics={"loss": math.nan, "grad_norm": math.inf})
    )
    values = found["relax_train_step_metric"]
    assert math.isnan(values[(("metric", "loss"),)])
    assert values[(("metric", "grad_norm"),)] == math.inf


@pytest.mark.parametrize(("checkpoints", "behind"), [([], 4), ([0], 3), ([0, 2], 1), ([3], 0)])
def test_checkpoint_lag_metric_counts_the_steps_recovery_would_replay(
    make_run_config: MakeRunConfig, checkpoints: list[int], behind: int
) -> None:
    reference = CheckpointRef(policy_version=1, uri="file:///c", digest=b"d")
    steps = [
        committed(step, checkpoint=reference if step in checkpoints else None) for step in range(4)
    ]
    assert served(make_run_config(), *steps)["relax_checkpoint_behind_steps"] == {(): behind}


def test_workers_are_counted_by_the_state_in_their_last_heartbeat(
    make_run_config: MakeRunConfig,
) -> None:
    config = make_run_config(workers={"heartbeat_timeout_seconds": 5.0, "rollout": 2})
    found = served(
        config,
        make_heartbeat("rollout-0", WorkerState.IDLE),
        make_heartbeat("rollout-0", WorkerState.WORKING),
        make_heartbeat("rollout-1", WorkerState.WORKING, seconds_ago=6.0),
        make_heartbeat("reward-0", WorkerState.STOPPED, seconds_ago=60.0),
        make_heartbeat("reward-7", WorkerState.IDLE),
        make_heartbeat(
            "trainer-0", WorkerState.STARTING, seconds_ago=60.0
        ),  # it loads a large model
    )["relax_workers"]
    reported = {
        (dict(labels)["role"], dict(labels)["state"]): value
        for labels, value in found.items()
        if value
    }
    assert reported == {
        ("rollout", "working"): 1,
        ("rollout", "silent"): 1,
        ("reward", "stopped"): 1,
        ("reward", "idle"): 1,
        ("trainer", "starting"): 1,
    }
    assert {dict(labels)["role"] for labels in found} == set(config.roles())
    assert (
        len(found) == len(config.roles()) * 6
    )  # a role without workers has zeros, so that an alert can see it


def test_no_worker_counts_as_silent_while_all_heartbeats_are_old(
    make_run_config: MakeRunConfig,
) -> None:
    """The broker was away: all that is known is old, the newest of it too."""
    config = make_run_config(workers={"heartbeat_timeout_seconds": 5.0})
    heartbeats = [
        make_heartbeat(worker_id, WorkerState.WORKING, seconds_ago=600.0)
        for worker_id in ("controller-0", "rollout-0", "trainer-0")
    ]
    silent = {
        labels: value
        for labels, value in served(config, *heartbeats)["relax_workers"].items()
        if ("state", "silent") in labels
    }
    assert set(silent.values()) == {0}
    silent = served(config, *heartbeats, make_heartbeat("controller-0", WorkerState.WORKING))[
        "relax_workers"
    ]
    assert {
        dict(labels)["role"]
        for labels, value in silent.items()
        if value and dict(labels)["state"] == "silent"
    } == {"rollout", "trainer"}


def test_engine_version_lag_metric_follows_the_slowest_live_engine(
    make_run_config: MakeRunConfig,
) -> None:
    events = [
        published(7),
        make_heartbeat("rollout-0", WorkerState.WORKING, policy_version=7),
        make_heartbeat("rollout-1", WorkerState.IDLE, policy_version=4),
        make_heartbeat("rollout-2", WorkerState.STARTING),
        make_heartbeat("rollout-3", WorkerState.STOPPED, policy_version=1),
        make_heartbeat("rollout-4", WorkerState.WORKING, policy_version=2, seconds_ago=3600.0),
        make_heartbeat("trainer-0", WorkerState.WORKING, policy_version=0),
    ]
    assert served(make_run_config(), *events)["relax_engine_behind_versions"] == {(): 3}
    assert "relax_engine_behind_versions" not in served(make_run_config(), published(7))


def test_failures_and_run_end_are_exported(make_run_config: MakeRunConfig) -> None:
    config = make_run_config(run={"max_failed_prompt_groups": 9})
    failures = [ended(f"000000-{index:04d}-0", Outcome.FAILED, reason="r") for index in range(3)]
    going = served(config, *failures)
    assert (
        going["relax_prompt_groups_consecutive_failures"],
        going["relax_prompt_groups_consecutive_failures_limit"],
    ) == ({(): 3}, {(): 9})
    assert going["relax_run_ended"] == {(): 0}
    assert served(config, RunCommanded(command=Command.STOP, reason="goal", succeeded=True))[
        "relax_run_ended"
    ] == {(): 1}


def test_newest_evaluation_of_each_dataset_is_exported(make_run_config: MakeRunConfig) -> None:
    def evaluated(version: int, dataset: str, reward: float | None) -> PolicyEvaluated:
        return PolicyEvaluated(
            policy_version=version,
            dataset=dataset,
            num_prompts=1,
            samples_per_prompt=1,
            reward_mean=reward,
            weights_digest=b"d",
        )

    found = served(
        make_run_config(), evaluated(4, "a", 0.5), evaluated(2, "a", 0.25), evaluated(4, "b", None)
    )
    assert found["relax_evaluation_policy_version"] == {
        (("dataset", "a"),): 4,
        (("dataset", "b"),): 4,
    }
    assert found["relax_evaluation_reward_mean"] == {(("dataset", "a"),): 0.5}


def test_queue_length_and_free_disk_are_exported_only_when_known(
    make_run_config: MakeRunConfig, tmp_path: Path
) -> None:
    metrics, registry = RunMetrics(make_run_config(), RunState()), CollectorRegistry()
    registry.register(metrics)
    usage = shutil.disk_usage(tmp_path)
    assert registry.get_sample_value("relax_prompt_groups_queued") is None
    assert registry.get_sample_value("relax_disk_free_ratio") == pytest.approx(
        usage.free / usage.total, abs=0.01
    )
    metrics.num_queued = 0
    assert registry.get_sample_value("relax_prompt_groups_queued") == 0
    elsewhere = RunMetrics(
        make_run_config(run={"directory": str(tmp_path / "nowhere")}), RunState()
    )
    assert [
        family.samples for family in elsewhere.collect() if family.name == "relax_disk_free_ratio"
    ] == [[]]


def test_number_of_metric_series_does_not_grow_with_the_run(make_run_config: MakeRunConfig) -> None:
    config = make_run_config(run={"max_staleness": 1})

    def series(num_steps: int) -> set[tuple[str, Labels]]:
        events: list[Event] = [
            make_heartbeat(f"rollout-{index}", WorkerState.WORKING, policy_version=index)
            for index in range(num_steps)
        ]
        for step in range(num_steps):
            events += [
                committed(step, metrics={"reward_mean": 0.5}, phase_seconds={"wait": 1.0}),
                published(step + 1),
            ]
            events.append(
                ended(f"{step:06d}-0000-0", Outcome.FAILED, reason=f"sample {step} was odd")
            )
        return {
            (name, labels) for name, found in served(config, *events).items() for labels in found
        }

    assert series(3) == series(50)
