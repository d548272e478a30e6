"""Workers that hang, and workers that send heartbeats without progress, are detected, restarted,
and at last abort the run; whole runs on the real broker.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from harness import WORKER_SECONDS, FaultRun, assert_ledger_balances
from run_setup import SLOW_SECONDS

HEALTH = {"progress_timeout_seconds": 15.0, "backoff_seconds": 1.0}
WORKERS = {"heartbeat_seconds": 0.2, "heartbeat_timeout_seconds": 10.0}


def asked(run: FaultRun, worker_id: str, path: str) -> str:
    """Request a worker's endpoint, and return the response."""
    try:
        with urlopen(
            f"http://127.0.0.1:{run.state.workers[worker_id].metrics_port}{path}", timeout=60
        ) as answer:
            return str(answer.read().decode().strip())
    except HTTPError as refusal:
        return refusal.read().decode().strip()


def commanded(run: FaultRun) -> list[tuple[str | None, str | None, str | None]]:
    """Return what the health manager has commanded: worker, tier, symptom."""
    events = [run.decode(record) for record in run.records("control.commands")]
    restarts = [event for event in events if getattr(event, "arguments", {}).get("tier")]
    return [
        (event.worker_id, event.arguments["tier"], event.arguments["symptom"]) for event in restarts
    ]


def test_stuck_worker_is_restarted_and_the_count_survives_the_controller(
    start_run: Callable[..., FaultRun], directory: Path
) -> None:
    engine = {"name": f"{directory / 'engine.py'}:StuckOnce"}
    run = start_run(run={"num_steps": 40}, engine=engine, health=HEALTH)
    run.start()
    run.wait_until(lambda: (run.folder / "stuck").exists(), "the engine no longer samples")
    stuck = run.pid("rollout-0")
    run.wait_until(
        lambda: asked(run, "rollout-0", "/healthz").startswith(
            "no: it has made no progress with its work for"
        ),
        "it says that it is stuck",
    )
    run.wait_until(lambda: run.pid("rollout-0") not in (stuck, -1), "another process generates")
    run.wait_until_ready_again("controller-0", killed=run.kill("controller-0"))
    run.recovers_within(WORKER_SECONDS)
    exposed = run.metrics("controller-0")
    assert exposed['relax_health_restarts_total{role="rollout",symptom="stuck"}'] == 1
    assert exposed["relax_pipeline_restarts_total"] == exposed["relax_run_aborted"] == 0

    assert run.wait_until_ended(run.process) == 0
    assert_ledger_balances(run)
    assert commanded(run) == [("rollout-0", "restart", "stuck")]


@pytest.mark.long
def test_run_skips_steps_that_are_not_finite_and_ends_after_several_in_a_row(
    start_run: Callable[..., FaultRun], directory: Path
) -> None:
    run = start_run(
        run={"num_steps": 20},
        trainer={"backend": f"{directory / 'trainer.py'}:NotFinite", "max_steps_not_finite": 2},
    )
    run.start()
    assert run.wait_until_ended(run.process) == 1
    assert run.state.ended is not None
    assert (
        "train steps in a row had a loss or gradient that is not finite "
        "(trainer.max_steps_not_finite)"
    ) in run.state.ended.reason
    skipped = [step.train_step for step in run.state.steps if step.update_skipped]
    assert skipped == [3, *range(6, run.state.num_steps)]
    assert len(skipped) >= 3
    assert [line["worker_id"] for line in run.logged("run", "worker.spawned")].count(
        "trainer-0"
    ) == 1
    ledger = run.ledger()
    assert (ledger["samples_lost"], ledger["updates_skipped"]) == (0, len(skipped))


@pytest.mark.long
def test_hung_worker_is_started_again(start_run: Callable[..., FaultRun]) -> None:
    run = start_run(run={"num_steps": 40}, workers=WORKERS)
    run.start()
    run.wait_until_steps(3)
    hung = run.signal(signal.SIGSTOP, "reward-0")
    run.wait_until_ready_again("reward-0", killed=hung)
    run.recovers_within(WORKER_SECONDS)
    assert run.wait_until_ended(run.process) == 0
    assert_ledger_balances(run)
    assert ("reward-0", "restart", "silent") in commanded(run)


@pytest.mark.long
def test_calls_longer_than_the_heartbeat_timeout_do_not_restart_the_trainer(
    start_run: Callable[..., FaultRun], directory: Path
) -> None:
    workers = {"heartbeat_seconds": 0.2, "heartbeat_timeout_seconds": SLOW_SECONDS / 2}
    health = HEALTH | {
        "progress_timeout_seconds": 8 * SLOW_SECONDS,
        "max_restarts": 1,
        "max_pipeline_restarts": 0,
    }
    run = start_run(
        run={"num_steps": 3},
        trainer={"backend": f"{directory / 'trainer.py'}:Slow"},
        workers=workers,
        health=health,
    )
    run.start()
    activities = set[str]()

    def observe_activity() -> bool:
        heartbeat = run.state.workers.get("trainer-0")
        activities.update({heartbeat.activity} if heartbeat else ())
        return run.process.poll() is not None

    run.wait_until(
        lambda: observe_activity() or run.state.num_steps == 2, "the slow step is committed"
    )
    assert run.wait_until_ended(run.process) == 0
    assert activities >= {"train a micro-batch", "step the optimizer", "write weights"}
    assert commanded(run) == []
    assert_ledger_balances(run)


@pytest.mark.long
def test_trainer_hung_in_a_call_is_restarted_at_its_deadline_then_run_aborts(
    start_run: Callable[..., FaultRun], directory: Path
) -> None:
    health = HEALTH | {"max_restarts": 1, "max_pipeline_restarts": 0}
    run = start_run(
        run={"num_steps": 3},
        trainer={"backend": f"{directory / 'trainer.py'}:Hung"},
        workers=WORKERS,
        health=health,
    )
    run.start()
    assert run.wait_until_ended(run.process) == 1
    assert commanded(run) == [("trainer-0", "restart", "overdue")]
    assert run.state.ended is not None
    assert "step the optimizer, whose deadline passed" in run.state.ended.reason


@pytest.mark.long
def test_pipeline_is_restarted_and_then_the_run_aborted_if_still_stuck(
    start_run: Callable[..., FaultRun], directory: Path
) -> None:
    engine = {
        "name": f"{directory / 'engine.py'}:Stuck",
        "max_running_samples": 4,
        "max_prompt_groups": 1,
    }
    health = HEALTH | {
        "progress_timeout_seconds": 15.0,
        "max_restarts": 1,
        "max_pipeline_restarts": 1,
    }
    few_roles = {"kl_coefficient": 0.0, "old_logprobs": "rollout"}
    sections = {
        "run": {"num_steps": 40, "prompts_per_step": 64},
        "algorithm": few_roles,
        "workers": {"heartbeat_seconds": 0.2, "heartbeat_timeout_seconds": 20.0},
    }
    run = start_run(**sections, engine=engine, health=health)
    run.start()
    assert run.wait_until_ended(run.process, timeout_seconds=220) == 1
    pipeline = {f"{role}-0" for role in run.config.roles()} - {"controller-0", "metrics-0"}
    reported = commanded(run)
    assert reported[0] == ("rollout-0", "restart", "stuck")
    assert sorted(reported[1:]) == sorted((worker_id, "restore", "stuck") for worker_id in pipeline)
    assert run.state.ended is not None
    assert run.state.ended.reason.startswith("rollout-0 has had work for ")
    assert run.state.ended.reason.endswith(
        "1 restarts did not help; nor did 1 pipeline restarts (health.max_pipeline_restarts); see "
        "docs/how-to/alerts.md#relaxrunaborted"
    )


@pytest.mark.long
def test_suspended_controller_exits_when_it_resumes(
    start_run: Callable[..., FaultRun],
) -> None:
    run = start_run(run={"num_steps": 240}, workers=WORKERS | {"heartbeat_timeout_seconds": 25.0})
    run.start()
    run.wait_until_steps(3)
    hung = run.signal(signal.SIGSTOP, "controller-0")
    run.follow_for(27.0)
    run.signal_process(signal.SIGCONT, hung["controller-0"])
    run.wait_until_ready_again("controller-0", killed=hung)
    assert run.wait_until_ended(run.process) == 0
    assert commanded(run) == [], "it had received no heartbeat, not even its own"
    assert_ledger_balances(run)


@pytest.mark.long
def test_worker_is_healthy_but_not_ready_while_the_broker_is_unreachable(
    start_run: Callable[..., FaultRun],
) -> None:
    run = start_run(run={"num_steps": 60})
    run.start()
    run.wait_until_steps(2)
    assert asked(run, "reward-0", "/healthz").startswith("ok")
    assert asked(run, "reward-0", "/readyz") == "ok"
    assert run.broker.pid is not None
    os.kill(run.broker.pid, signal.SIGSTOP)
    try:
        run.wait_until(
            lambda: asked(run, "reward-0", "/readyz") == "no: the broker does not answer",
            "a worker notices",
        )
        assert asked(run, "reward-0", "/healthz").startswith("ok")
    finally:
        os.kill(run.broker.pid, signal.SIGCONT)
    run.recovers_within(WORKER_SECONDS)
    run.wait_until(lambda: asked(run, "reward-0", "/readyz") == "ok", "it takes work again")
    assert commanded(run) == []
