"""A worker is suspended between its output and its commit, and another takes over its partitions:
the late commit is rejected, and no record is duplicated.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable

import pytest
from harness import WORKER_SECONDS, FaultRun, assert_ledger_balances, failpoint_marker

from relax_events.events.codec import EventCodec
from relax_events.events.sample_columns import split_samples
from relax_events.events.types import SampleScored
from relax_events.runtime.failpoints import marks_folder

POINT = "reward.before_commit:3=stop"
EXPIRED = 'relax_records_expired_total{role="reward"}'


@pytest.mark.long
def test_commit_of_a_stale_member_is_rejected_and_its_work_redone(
    start_run: Callable[..., FaultRun],
) -> None:
    run = start_run(run={"num_steps": 72}, workers={"reward": 2}, telemetry={"log_level": "debug"})
    run.arm(POINT)
    run.start()
    run.wait_until(
        lambda: run.fired() == {failpoint_marker(POINT)}, "one of the reward workers stops"
    )
    pid = int((marks_folder(run.folder) / failpoint_marker(POINT)).read_text())
    stale, other = sorted(("reward-0", "reward-1"), key=lambda one: run.pid(one) != pid)
    assert run.pid(stale) == pid
    num_expired = -run.metrics(other).get(EXPIRED, 0.0)
    run.recovers_within(WORKER_SECONDS)
    num_expired += run.metrics(other).get(EXPIRED, 0.0)
    os.kill(pid, signal.SIGCONT)
    run.wait_until(
        lambda: bool(run.logged(stale, "offset_commit.rejected")), "the late commit is refused"
    )
    assert run.state.num_steps < run.config.run.num_steps, (
        "it came back within the run, not after it"
    )

    assert run.wait_until_ended(run.process) == 0
    assert_ledger_balances(run)
    assert len(run.logged(stale, "worker.started")) == 1
    codec = EventCodec()
    events = [
        event
        for record in run.records("reward.scores", num_partitions=run.plan.num_sample_partitions)
        for event in split_samples(codec.decode(record.value))
    ]
    times_scored = Counter(event.sample_id for event in events if isinstance(event, SampleScored))
    most = max(times_scored.values())
    assert most <= 2
    # the trainer continues with what was written: its version may leave the window before the
    # partitions move, and the successor skips what it finds there
    assert most == 2 or num_expired, (
        "what was written and not committed was written again, or had expired"
    )
