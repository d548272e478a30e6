"""A run with two roles in one process trains what a run with a process for each role trains, also
when these processes are killed; and less memory is taken.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import call_relax, log_of, report_of, run_file_text

pytestmark = pytest.mark.timeout(600)
SECONDS = 280.0
NUM_STEPS = 4
SYNC = 'mode = "sync"\nmax_staleness = 0'
KILLS = (
    "actor-forward.before_commit=kill,reference.before_flush:3=kill,advantage.before_commit=kill"
)


@pytest.mark.long
def test_hybrid_run_trains_the_same_also_through_kills(
    prepared: Path, tmp_path: Path, bootstrap_servers: str, run_id: str
) -> None:
    run_file = tmp_path / "run.toml"
    run_file.write_text(run_file_text(prepared, run_id, more=SYNC, num_steps=NUM_STEPS))
    reports = {}
    for name, overrides, failpoints in (
        ("apart", (), ""),
        ("hybrid", ("workers.hybrid=true",), KILLS),
    ):
        ended = call_relax(
            "run",
            run_file,
            f"run.id={run_id}-{name}",
            f"broker.bootstrap_servers={bootstrap_servers}",
            "algorithm.kl_coefficient=0.01",
            "algorithm.old_logprobs=actor",
            *overrides,
            cwd=tmp_path,
            timeout_seconds=SECONDS,
            failpoints=failpoints,
        )
        assert ended.code == 0, ended.err
        reports[name] = report_of(tmp_path, f"{run_id}-{name}")
    apart, hybrid = reports["apart"], reports["hybrid"]
    assert hybrid["ledger_problems"] == []
    assert hybrid["outcomes"]["trained"] == 4 * NUM_STEPS
    assert hybrid["curves"]["reward_mean"] == pytest.approx(apart["curves"]["reward_mean"])
    assert hybrid["curves"]["loss"] == pytest.approx(apart["curves"]["loss"], abs=1e-6)
    assert hybrid["curves"]["kl_estimate"] == pytest.approx(
        apart["curves"]["kl_estimate"], abs=1e-6
    )
    events = log_of(tmp_path, f"{run_id}-hybrid", "reference-0")
    started = [event for event in events if event["event"] == "worker.started"]
    assert {event["worker_id"] for event in started} == {"reference-0", "actor-forward-0"}
    assert len(started) == 6, "the process was killed twice"
