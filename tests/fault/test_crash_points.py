"""Every role is killed at every failpoint: a few runs, in each of which every role dies at several
failpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import FaultRun, assert_ledger_balances, failpoint_marker
from run_setup import DEVICE_CELLS, judge_config

from relax_events.events.codec import EventCodec
from relax_events.events.types import BroadcastMembership, PolicyEvaluated, TrainStepCommitted
from relax_events.runtime.failpoints import POINTS

STEPS = 14
STEPS_OF_ONE_ROLE = 6
ENDED_SECONDS = 600.0
"""Ten workers start again up to ten times: a slow machine needs minutes for it."""
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
    ("weights.broadcasting:3", "weights.receiving:2"),
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
        "prompter.before_issue:3",
        "prompter.after_claim",
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
    (
        "rollout.before_load:3",
        "advantage.handing_over",
        "checkpoint.before_manifest",
        "trainer.after_ends",
    ),
    ("teacher.before_flush:2", "teacher.before_commit", "teacher.after_commit"),
    ("judge.at_work:5", "judge.before_flush:8", "judge.before_commit:4", "judge.after_commit:6"),
    ("evaluator.before_load:2", "evaluator.generating:2", "evaluator.after_write:2"),
    ("trainer.after_optimizer_step:6",),
    ("trainer.out_of_memory:2",),
    ("critic.out_of_memory:2", "scorer.out_of_memory:2"),
    (
        "critic.before_flush",
        "critic.before_commit:2",
        "critic.after_commit:2",
        "critic.learning:3",
    ),
]

ELSEWHERE = [("trainer.step_out_of_memory",)]
"""In `test_large_things.py`, where two steps alone don't fit: each of them costs a death."""


def test_every_failpoint_is_covered_by_a_test() -> None:
    assert sorted(
        failpoint_marker(f"{point}=kill").rpartition(":")[0]
        for points in BY_DEFAULT + LONG + ELSEWHERE
        for point in points
    ) == sorted(POINTS)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "points",
    [*BY_DEFAULT, *(pytest.param(points, marks=pytest.mark.long) for points in LONG)],
    ids=lambda points: points[0].partition(":")[0],
)
def test_run_finishes_when_workers_are_killed_at_failpoints(
    points: tuple[str, ...], start_run: Callable[..., FaultRun], directory: Path
) -> None:
    # Two advantage workers, so that one hands partitions over to the other; a reward function that
    # raises, so that prompt groups end untrained.
    evaluation = {
        "every": 3,
        "datasets": [
            {"name": name, "source": f"jsonl:{directory / 'prompts.jsonl'}"}
            for name in ("one", "two")
        ],
    }
    is_evaluated, is_taught, is_broadcast = (
        points[0].startswith(prefix)
        for prefix in ("evaluator.", "teacher.", "weights.broadcasting")
    )
    judge_sections = judge_config(directory) if points[0].startswith("judge.") else {}
    run = start_run(
        run={"num_steps": STEPS_OF_ONE_ROLE if is_taught else STEPS},
        evaluation=evaluation if is_evaluated else {},
        algorithm={"distill_coefficient": 0.1}
        if is_taught
        else {"name": "ppo"}
        if points[0].startswith("critic.")
        else {"min_samples_per_group": 4}  # one sample without a reward ends its prompt group
        if "trainer.after_ends" in points
        else {},
        teacher={"model_path": str(directory / "model")} if is_taught else {},
        trainer={"checkpoint_every": 3} | trainer_settings(points[0], directory),
        weights={"transport": "gloo", "bucket_bytes": 4096, "async_publish": True}
        if is_broadcast
        else {},
        workers={"advantage": 2, "max_restarts": len(points)},
        **{"reward": {"function": f"{directory / 'reward.py'}:badly", "timeout_seconds": 1.0}}
        | judge_sections,
    )
    armed = [f"{point}=kill" for point in points]
    run.arm(*armed)
    assert run.wait_until_ended(run.start(), timeout_seconds=ENDED_SECONDS) == 0
    assert run.fired() == {failpoint_marker(point) for point in armed}
    assert_ledger_balances(run)
    if is_evaluated:
        assert_evaluated_once(run)
    if is_broadcast:
        assert_broadcast_again(run)


def trainer_settings(point: str, directory: Path) -> dict[str, Any]:
    """Return what a trainer or critic needs to come to a point."""
    role, _, name = point.partition(".")
    if name.startswith("out_of_memory"):
        small = f"{directory / 'trainer.py'}:{'Small' if role == 'trainer' else 'SmallCritic'}"
        return {"backend": small, "max_tokens_per_micro_batch": 2 * DEVICE_CELLS}
    return {"num_epochs": 2, "num_mini_batches": 2} if point.startswith("trainer.") else {}


def assert_evaluated_once(run: FaultRun) -> None:
    """Assert that what was evaluated has one result each, first and last version among them, of the
    weights that the trainer published."""
    codec = EventCodec()
    events = [
        codec.decode(record.value)
        for entity in ("control.evaluations", "control.train-steps")
        for record in run.records(entity)
    ]
    found = [event for event in events if isinstance(event, PolicyEvaluated)]
    digests = {
        event.policy_version: event.weights_digest
        for event in events
        if isinstance(event, TrainStepCommitted)
    }
    names = [(event.policy_version, event.dataset) for event in found]
    assert len(set(names)) == len(names)
    assert {(version, name) for version in (0, STEPS) for name in ("one", "two")} <= set(names)
    assert all(
        event.weights_digest == digests[event.policy_version]
        for event in found
        if event.policy_version
    )


def assert_broadcast_again(run: FaultRun) -> None:
    """Assert that receivers and trainer reconnected after one of each had died, and that each
    process of a receiver first loaded weights from the store."""
    codec = EventCodec()
    lists = [
        event
        for record in run.records("control.broadcast-membership")
        if isinstance(event := codec.decode(record.value), BroadcastMembership)
    ]
    assert [reported.membership_version for reported in lists] == list(range(1, len(lists) + 1))
    assert len({reported.join_token for reported in lists}) == 2, "of two trainers"
    lives = [
        life for worker_id in ("rollout-0", "actor-forward-0") for life in _loads(run, worker_id)
    ]
    assert [transports[0] for transports in lives] == ["store"] * 3, "one of them died"
    assert all("memory" in _loads(run, name)[-1] for name in ("rollout-0", "actor-forward-0"))


def _loads(run: FaultRun, worker_id: str) -> list[list[str]]:
    """Return by which transports each process of a worker loaded weights."""
    starts = [line["timestamp"] for line in run.logged(worker_id, "worker.started")]
    loads = run.logged(worker_id, "weights.loaded")
    return [
        [line["transport"] for line in loads if start < line["timestamp"] < end]
        for start, end in zip(starts, [*starts[1:], "9"], strict=True)
    ]
