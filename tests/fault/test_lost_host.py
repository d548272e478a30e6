"""A rollout worker that is silent without closing a connection, as one whose host is gone: its prompt
groups go to others in seconds, not in the hour that the broker keeps its leases.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import WORKER_SECONDS, FaultRun, assert_ledger_balances

TAKEOVER_SECONDS = 6.0
WORKERS = ("rollout-0", "rollout-1")


@pytest.mark.long
def test_prompt_groups_of_a_silent_worker_are_generated_by_another(
    start_run: Callable[..., FaultRun], directory: Path
) -> None:
    run = start_run(
        run={"num_steps": 24},
        engine={"name": f"{directory / 'engine.py'}:StuckOnce"},
        workers={"rollout": 2, "takeover_seconds": TAKEOVER_SECONDS},
    )
    assert run.config.broker.lease_seconds == 3600
    run.start()
    run.wait_until(lambda: (run.folder / "stuck").exists(), "an engine no longer samples")

    def holders() -> list[str]:
        heartbeats = {worker_id: run.state.workers.get(worker_id) for worker_id in WORKERS}
        return [name for name, last in heartbeats.items() if last and last.prompt_groups_in_flight]

    run.wait_until(lambda: len(holders()) == 1, "only that engine has prompt groups left")
    run.follow_for(2.0)
    (silent,) = holders()
    stopped = run.signal(signal.SIGSTOP, silent)
    run.recovers_within(TAKEOVER_SECONDS + WORKER_SECONDS)
    assert run.pid(silent) == stopped[silent], "it was not started again"
    lost = [line["holder"] for line in run.logged("prompter-0", "prompt_groups.lost")]
    assert silent in lost

    run.kill(silent)  # its connections close: what it held is delivered again, under the same ids
    assert run.wait_until_ended(run.process) == 0
    assert_ledger_balances(run)
