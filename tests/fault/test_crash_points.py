"""Every role kills itself at every named crash point: a few runs, in each of which every role dies at points of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from harness import FaultRun, assert_books_balance, mark_of

from relax_events.pipeline.failpoints import POINTS

STEPS = 14
BY_DEFAULT = [
    (
        "rollout.before_flush:2",
        "reward.before_commit:3",
        "reference.before_commit:3",
        "actor-forward.before_commit:3",
        "advantage.before_commit:3",
        "trainer.after_weights:3",
        "trainer.in_transaction:2",
        "controller.after_command",
    ),
]
LONG = [
    (
        "rollout.before_settle:2",
        "reward.after_commit:3",
        "reference.after_commit:3",
        "actor-forward.after_commit:3",
        "trainer.after_commit:2",
        "trainer.replaying",
        "checkpoint.before_shard",
    ),
    (
        "prompter.after_issue:2",
        "rollout.generating:3",
        "reward.before_flush:3",
        "reference.before_flush:3",
        "actor-forward.before_flush:3",
        "advantage.before_flush:3",
        "trainer.after_accumulate:2",
        "weights.before_manifest:3",
        "metrics.before_write:5",
        "controller.before_command",
    ),
    ("rollout.before_load:3", "advantage.handing_over", "checkpoint.before_manifest", "trainer.after_ends"),
]


def test_every_point_has_its_turn() -> None:
    assert sorted(mark_of(f"{point}=kill").rpartition(":")[0] for points in BY_DEFAULT + LONG for point in points) == sorted(POINTS)


@pytest.mark.parametrize(
    "points",
    [*BY_DEFAULT, *(pytest.param(points, marks=pytest.mark.long) for points in LONG)],
    ids=lambda points: points[0].partition(":")[0],
)
def test_run_ends_by_itself_when_workers_kill_themselves_at(points: tuple[str, ...], start_run: Callable[..., FaultRun], directory: Path) -> None:
    # Two advantage workers, so that one hands partitions over to the other; a reward function that raises, so that prompt groups end untrained.
    run = start_run(
        run={"num_steps": STEPS},
        trainer={"checkpoint_every": 3},
        workers={"advantage": 2},
        reward={"function": f"{directory / 'reward.py'}:badly", "timeout_seconds": 1.0},
    )
    armed = [f"{point}=kill" for point in points]
    run.arm(*armed)
    assert run.until_ended(run.start()) == 0
    assert run.fired() == {mark_of(point) for point in armed}
    assert_books_balance(run)
