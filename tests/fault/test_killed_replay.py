"""A replay whose trainer is killed repeatedly equals its parent bit for bit, and its own ledger
balances.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from harness import FaultRun, assert_ledger_balances, failpoint_marker

STEPS = 10
POINTS = (
    "trainer.after_weights:2=kill",
    "trainer.in_transaction:3=kill",
    "trainer.after_commit:4=kill",
    "trainer.replaying=kill",
)


@pytest.mark.long
def test_replay_reproduces_its_source_when_its_trainer_is_killed(
    start_run: Callable[..., FaultRun],
) -> None:
    source = start_run(run={"num_steps": STEPS})
    assert source.wait_until_ended(source.start()) == 0
    replay = start_run(
        run={"num_steps": STEPS},
        parent={"run": source.config.run.id},
        trainer={"checkpoint_every": 3},
    )
    replay.arm(*POINTS)
    assert replay.wait_until_ended(replay.start()) == 0
    assert replay.fired() == {failpoint_marker(point) for point in POINTS}
    assert assert_ledger_balances(replay)["rollouts_regenerated"] == 0
    assert replay.report()["weights_digests"] == source.report()["weights_digests"]
    assert replay.report()["curves"]["loss"] == source.report()["curves"]["loss"]
