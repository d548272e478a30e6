"""A published artifact is altered before the engine reads it: the engine rejects it whole, and
loads the next version.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
from harness import WORKER_SECONDS, FaultRun, assert_ledger_balances

STEPS = 48
AHEAD_SECONDS = 3.0
"""In which rollout generates all that its staleness permits, and it is scored."""


def publish_behind_the_engines_back(run: FaultRun) -> int:
    """Let rollout get ahead, stop it, and let the trainer publish; return the newest version, which
    the engine has not read."""
    while True:
        run.wait_until_steps(run.state.num_steps + 1)
        run.signal(signal.SIGSTOP, "trainer-0")
        run.follow_for(AHEAD_SECONDS)
        run.signal(signal.SIGSTOP, "rollout-0")
        run.follow_for(0.5)
        before = run.state.policy_version
        run.signal(signal.SIGCONT, "trainer-0")
        run.wait_until_steps(run.state.num_steps + 1)
        run.signal(signal.SIGSTOP, "trainer-0")
        run.follow_for(0.5)
        serving = run.logged("rollout-0", "weights.loaded")[-1]["policy_version"]
        published = run.state.policy_version
        if serving <= before < published <= serving + run.config.run.max_staleness:
            return published
        run.signal(signal.SIGCONT, "rollout-0", "trainer-0")


@pytest.mark.long
def test_engine_rejects_an_altered_artifact_and_recovers_with_the_next_version(
    start_run: Callable[..., FaultRun],
) -> None:
    run = start_run(run={"num_steps": STEPS})
    run.start()
    run.wait_until_steps(2)
    altered = publish_behind_the_engines_back(run)
    (file,) = (run.folder / "objects" / "weights" / f"{altered:08d}").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    run.signal(signal.SIGCONT, "rollout-0", "trainer-0")
    run.recovers_within(WORKER_SECONDS)

    run.wait_until(
        lambda: bool(run.logged("rollout-0", "weights.load_failed")),
        "the engine refuses the version",
    )
    run.wait_until(
        lambda: run.logged("rollout-0", "weights.loaded")[-1]["policy_version"] > altered,
        "the engine loads a newer version",
    )
    assert run.wait_until_ended(run.process) == 0
    assert_ledger_balances(run)
    refused = run.logged("rollout-0", "weights.load_failed")
    loaded = [
        line["policy_version"]
        for line in run.logged("rollout-0", "weights.loaded")
        if line["timestamp"] < refused[0]["timestamp"]
    ]
    assert {(line["policy_version"], line["serving"]) for line in refused} == {
        (altered, loaded[-1])
    }
    assert f"{altered:08d}" in refused[0]["error"]
    assert "BLAKE3" in refused[0]["error"]
    assert len(run.logged("rollout-0", "worker.started")) == 1
    versions = {
        segment.policy_version for sample in run.samples() for segment in sample.version_segments
    }
    assert altered not in versions
    assert min(versions) < altered < max(versions)
