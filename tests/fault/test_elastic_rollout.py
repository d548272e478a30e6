"""Rollout and judge workers are added and removed by the API while a run trains, and no sample is
lost.
"""

from __future__ import annotations

import signal
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import FaultRun, assert_ledger_balances
from run_setup import judge_config
from scaling_calls import API, outcomes, scale, state_of, wait_until_over

from relax_events.events.parts import WorkerState
from relax_events.projections.scale_requests import Status


@pytest.mark.long
@pytest.mark.timeout(400)
def test_rollout_scales_to_three_workers_and_back_without_losing_samples(
    start_run: Callable[..., FaultRun],
) -> None:
    run = start_run(run={"num_steps": 40}, **API)
    run.start()
    run.wait_until_steps(2)
    run.signal(
        signal.SIGSTOP, "trainer-0"
    )  # so that there is work left, however long two workers take to start
    run.process.send_signal(
        signal.SIGSTOP
    )  # so that the request is open until it has been asked for again
    code, answer = scale(run, "--up-to", "3", "--key", "grow")
    assert (code, answer["status"], answer["selected_engines"]) == (
        0,
        "PENDING",
        ["rollout-1", "rollout-2"],
    )
    assert stat.S_IMODE((run.folder / "api-token").stat().st_mode) == 0o600
    grown = answer["request_id"]
    assert scale(run, "--up-to", "3", "--key", "grow")[1]["request_id"] == grown
    assert scale(run, "--down-to", "1", "--yes")[0] == 6, "the first request is open"
    run.process.send_signal(signal.SIGCONT)
    run.wait_until(
        lambda: run.is_ready("rollout-1") and run.is_ready("rollout-2"),
        "two workers more are ready",
    )
    run.signal(signal.SIGCONT, "trainer-0")
    assert wait_until_over(run, grown) is Status.ACTIVE
    assert outcomes(run, grown) == ["ACTIVE"]
    run.wait_until(
        lambda: min(run.num_taken(f"rollout-{index}") for index in (1, 2)) > 0,
        "both have taken prompt groups",
    )

    run.signal(signal.SIGSTOP, "trainer-0")  # so that the run is not over before they have left
    code, shrunk = scale(run, "--down-to", "1", "--yes")
    assert (code, shrunk["selected_engines"]) == (0, ["rollout-2", "rollout-1"])
    assert wait_until_over(run, shrunk["request_id"]) is Status.COMPLETED
    left = state_of(run)
    assert (left.workers, sorted(left.requests[shrunk["request_id"]].exits)) == (
        {},
        ["rollout-1", "rollout-2"],
    )
    assert set(run.running_workers()) == set(run.worker_ids), (
        "no worker is left behind, and those of the start stay"
    )
    assert [run.state.workers[f"rollout-{index}"].state for index in (1, 2)] == [
        WorkerState.STOPPED
    ] * 2
    run.signal(signal.SIGCONT, "trainer-0")

    assert run.wait_until_ended(run.process) == 0
    ledger = assert_ledger_balances(run)
    assert (
        ledger["rollouts_regenerated"],
        ledger["outcomes"]["expired"],
        ledger["outcomes"]["failed"],
    ) == (0, 0, 0)


@pytest.mark.long
@pytest.mark.timeout(400)
def test_judge_scales_to_two_workers_and_back_without_losing_samples(
    start_run: Callable[..., FaultRun], directory: Path
) -> None:
    run = start_run(run={"num_steps": 40}, **judge_config(directory), **API)
    run.start()
    run.wait_until_steps(2)
    run.signal(
        signal.SIGSTOP, "trainer-0"
    )  # so that there is work left, however long a worker takes to start
    code, answer = scale(run, "--model", "judge", "--up-to", "2")
    assert (code, answer["selected_engines"]) == (0, ["judge-1"])
    assert scale(run, "--model", "judge", "--attach", "http://127.0.0.1:1")[0] != 0, (
        "a server is the run file's to name"
    )
    run.wait_until(lambda: run.is_ready("judge-1"), "a second judge is ready")
    run.signal(signal.SIGCONT, "trainer-0")
    assert wait_until_over(run, answer["request_id"]) is Status.ACTIVE
    run.wait_until(lambda: run.state.workers["judge-1"].num_processed > 0, "it has judged")

    run.signal(signal.SIGSTOP, "trainer-0")  # so that the run is not over before it has left
    code, shrunk = scale(run, "--model", "judge", "--down-to", "1", "--yes")
    assert (code, shrunk["selected_engines"]) == (0, ["judge-1"])
    assert wait_until_over(run, shrunk["request_id"]) is Status.COMPLETED
    assert set(run.running_workers()) == set(run.worker_ids)
    run.signal(signal.SIGCONT, "trainer-0")

    assert run.wait_until_ended(run.process) == 0
    ledger = assert_ledger_balances(run)
    assert (ledger["outcomes"]["expired"], ledger["outcomes"]["failed"]) == (0, 0)
