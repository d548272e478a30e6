"""Workers of an older and a newer release score next to ours: the role that reads the scores
decodes all three.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path

import other_release
import pytest
from harness import LIVING_SECONDS, FaultRun, assert_ledger_balances

RELEASES = {"older": "reward-1", "newer": "reward-2"}


@pytest.mark.long
def test_run_continues_when_releases_are_mixed(start_run: Callable[..., FaultRun]) -> None:
    run = start_run(run={"num_steps": 24})
    run.start()
    run.wait_until_steps(2)
    run.signal(
        signal.SIGSTOP, "trainer-0"
    )  # so that there is work left, however long the others take to start
    for release, worker_id in RELEASES.items():
        words = [
            "worker",
            "reward",
            str(run.folder / "run.json"),
            "--index",
            worker_id.rpartition("-")[2],
        ]
        run.start_program([sys.executable, str(Path(other_release.__file__)), release, *words])
    run.wait_until(
        lambda: all(run.is_ready(worker_id) for worker_id in RELEASES.values()),
        "both other releases are ready",
    )
    run.signal(signal.SIGCONT, "trainer-0")
    run.recovers_within(LIVING_SECONDS)
    run.wait_until(
        lambda: all(
            run.state.workers[worker_id].num_processed > 0 for worker_id in RELEASES.values()
        ),
        "both have scored",
    )
    assert run.state.num_steps < run.config.run.num_steps, (
        "they scored within the run, not after it"
    )

    assert run.wait_until_ended(run.process) == 0
    ledger = assert_ledger_balances(run)
    assert (ledger["outcomes"]["failed"], ledger["records_unreadable"]) == (0, 0)
    scores = run.records("reward.scores", num_partitions=run.plan.num_sample_partitions)
    assert len({record.value[:10] for record in scores}) == 3, (
        "three writer schemas are on the topic"
    )
    assert run.records("advantage.dead-letters") == []
