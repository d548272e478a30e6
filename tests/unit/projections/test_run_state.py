"""The state of a run follows from its control log."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
from event_samples import committed, ended, published

from relax_events.events.parts import Command, Outcome, WorkerState
from relax_events.events.types import (
    Event,
    MetricsReported,
    PolicyVersionPublished,
    RunCommanded,
    WorkerHeartbeat,
)
from relax_events.projections.run_state import RunState, count_samples


def test_run_state_reflects_the_applied_events() -> None:
    state = RunState()
    assert (state.num_steps, state.reward, state.policy_version) == (0, None, -1)
    heartbeat = WorkerHeartbeat(
        worker_id="w",
        role="reward",
        host="h",
        pid=1,
        state=WorkerState.IDLE,
        num_processed=0,
        num_in_flight=0,
        last_progress_at=0,
    )
    report = MetricsReported(worker_id="w", role="reward", values={"busy_ratio": 0.5})
    events: list[Event] = [
        published(0),
        committed(0),
        published(1),
        committed(1, metrics={"reward_mean": 0.75}),
        heartbeat,
        report,
    ]
    for event in events:
        state.apply(event)
    assert (state.num_steps, state.reward, state.policy_version) == (2, 0.75, 1)
    assert (state.workers["w"], state.metrics["w"]) == (heartbeat, report)
    state.apply(
        MetricsReported(worker_id="w", role="critic", policy_version=2, values={"value_loss": 0.25})
    )
    assert (state.metrics["w"], state.critic_metrics) == (report, {1: {"value_loss": 0.25}})
    state.apply(published(0))
    assert state.policy_version == 1


def test_failures_in_a_row_are_dated_from_the_first_one() -> None:
    state = RunState()
    for at, outcome in enumerate((Outcome.FAILED, Outcome.EXPIRED, Outcome.FAILED), start=5):
        event = ended(f"00000{at}-0000-0", outcome)
        state.apply(replace(event, ended_at=at))
    assert (state.num_consecutive_failures, state.failing_since) == (2, 5)
    state.apply(replace(ended("000009-0000-0", Outcome.TRAINED), ended_at=9))
    assert (state.num_consecutive_failures, state.failing_since) == (0, 0)


def test_run_state_keeps_displayed_step_metrics_but_no_samples() -> None:
    of_samples = {
        "prompt_group_ids": ["a"],
        "sample_ids": ["a/0", "a/1"],
        "staleness_counts": [1, 1],
        "offsets": np.arange(2),
    }
    state, step = RunState(), committed(0, metrics={"reward_mean": 0.75}, **of_samples)
    state.apply(step)
    (kept,) = state.steps
    assert (kept.train_step, kept.metrics, kept.phase_seconds, kept.weights_digest) == (
        0,
        step.metrics,
        step.phase_seconds,
        step.weights_digest,
    )
    assert (kept.sample_ids, kept.prompt_group_ids, kept.consumed, len(kept.offsets)) == (
        [],
        [],
        [],
        0,
    )
    assert count_samples(kept) == 2


def test_run_state_counts_each_outcome_once_and_consecutive_failures() -> None:
    state = RunState()
    for index, outcome in enumerate(
        [
            Outcome.FAILED,
            Outcome.FAILED,
            Outcome.TRAINED,
            Outcome.FAILED,
            Outcome.EXPIRED,
            Outcome.FAILED,
        ]
    ):
        for _ in range(2):
            state.apply(ended(f"000000-{index:04d}-0", outcome, reason=f"reason {index}"))
    assert state.outcomes == {"failed": 4, "trained": 1, "expired": 1}
    assert (state.num_consecutive_failures, state.last_failure) == (2, "reason 5")


@pytest.mark.parametrize("order", list(permutations(range(3))), ids=str)
def test_run_state_is_the_same_whichever_topic_is_read_first(order: tuple[int, ...]) -> None:
    """A reader fetches several topics at once: outcomes may arrive before the first publication."""
    first = counting(7, {"trained": 56, "failed": 1})
    topics: list[list[Event]] = [
        [first, counting(8, {"trained": 57, "failed": 1})],
        [committed(7)],
        [ended("000007-0000-0", Outcome.TRAINED), ended("000007-0001-0", Outcome.FILTERED)],
    ]
    state = RunState()
    for topic in order:
        for event in topics[topic]:
            state.apply(event)
    assert (state.policy_version, state.num_steps) == (8, 8)
    assert state.outcomes == {"trained": 57, "failed": 1, "filtered": 1}


def counting(version: int, outcomes: dict[str, int]) -> PolicyVersionPublished:
    """Make the publication of a version that was preceded by a step for each earlier one."""
    return replace(published(version), num_steps_before=version, outcome_counts_before=outcomes)


def test_run_state_ends_only_on_a_stop_for_all_roles() -> None:
    state = RunState()
    state.apply(RunCommanded(command=Command.STOP, role="reward", reason="scale down"))
    state.apply(RunCommanded(command=Command.PAUSE, reason="wait"))
    assert state.ended is None
    state.apply(RunCommanded(command=Command.STOP, reason="goal", succeeded=True))
    assert state.ended is not None
    assert state.ended.succeeded


def test_run_state_counts_consecutive_skipped_updates_since_the_last_resume() -> None:
    state, counts = RunState(), []
    for step, is_skipped in enumerate([True, True, False, True]):
        state.apply(committed(step, update_skipped=is_skipped, committed_at=step + 1))
        counts.append(state.num_consecutive_skips)
    assert (counts, state.num_updates_skipped) == ([1, 2, 0, 1], 3)
    state.apply(RunCommanded(command=Command.RESUME, reason="resumed", commanded_at=20))
    assert state.num_consecutive_skips == 0
    state.apply(
        committed(4, update_skipped=True, committed_at=19)
    )  # read after the command, committed before it
    assert state.num_consecutive_skips == 0
    state.apply(committed(5, update_skipped=True, committed_at=21))
    assert state.num_consecutive_skips == 1


def test_held_updates_do_not_count_as_skipped_ones() -> None:
    state = RunState()
    for step in range(10):
        state.apply(committed(step, update_held=True, committed_at=step + 1))
    assert (state.num_consecutive_skips, state.num_updates_skipped) == (0, 0)


def test_forged_metrics_reports_do_not_count_as_skipped_updates() -> None:
    """Every role may write to control.metrics: its records must not end a run."""
    state = RunState()
    for at in range(10):
        forged = MetricsReported(
            worker_id="trainer-0",
            role="trainer",
            policy_version=7,
            values={"steps_not_finite": 1.0},
            reported_at=at,
        )
        state.apply(forged)
    assert (state.num_consecutive_skips, state.num_updates_skipped) == (0, 0)


def test_run_is_paused_until_it_is_resumed() -> None:
    state = RunState()
    state.apply(RunCommanded(command=Command.PAUSE, role="reward", reason="one role"))
    assert not state.is_paused
    state.apply(RunCommanded(command=Command.PAUSE, reason="maintenance"))
    assert state.is_paused
    state.apply(RunCommanded(command=Command.RESUME, reason="done"))
    assert not state.is_paused


def test_run_state_does_not_grow_with_the_run() -> None:
    state, whole = RunState(), RunState(keeps_all=True)
    state.apply(published(0))
    for step in range(1000):
        for event in (
            committed(step, update_skipped=True),
            ended(f"{step:06d}-0000-0", Outcome.TRAINED),
            published(step + 1),
        ):
            state.apply(event)
            whole.apply(event)
        state.apply(
            MetricsReported(
                worker_id="c", role="critic", policy_version=step + 1, values={"value_loss": 0.25}
            )
        )
    assert (state.num_steps, state.num_updates_skipped, state.outcomes) == (
        1000,
        1000,
        {"trained": 1000},
    )
    assert state.steps[-1].train_step == 999
    assert max(len(state.steps), len(state.critic_metrics)) < 256
    assert len(state.recent_outcomes) < 40_000
    assert (len(whole.steps), whole.num_steps) == (1000, 1000)


def test_run_state_can_start_at_any_publication_from_its_summary() -> None:
    state = RunState()
    for event in (
        replace(
            published(700),
            num_steps_before=699,
            outcome_counts_before={"trained": 5592, "failed": 3},
        ),
        committed(699),
        published(701),
    ):
        state.apply(event)
    state.apply(ended("000699-0000-0", Outcome.FAILED))
    assert (state.num_steps, state.policy_version, state.outcomes) == (
        700,
        701,
        {"trained": 5592, "failed": 4},
    )
