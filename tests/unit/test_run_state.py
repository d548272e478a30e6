"""The state of a run is what its control log says."""

from __future__ import annotations

import numpy as np
from event_samples import committed, ended, published

from relax_events.control.run_state import RunState, num_samples
from relax_events.events.parts import Command, Outcome, WorkerState
from relax_events.events.types import Event, MetricsReported, RunCommanded, WorkerBeat


def test_run_state_is_what_the_log_says() -> None:
    state = RunState()
    assert (state.num_steps, state.reward, state.policy_version) == (0, None, -1)
    beat = WorkerBeat(worker_id="w", role="reward", host="h", pid=1, state=WorkerState.IDLE, num_processed=0, num_in_flight=0, last_progress_at=0)
    report = MetricsReported(worker_id="w", role="reward", values={"busy_ratio": 0.5})
    events: list[Event] = [published(0), committed(0), published(1), committed(1, figures={"reward_mean": 0.75}), beat, report]
    for event in events:
        state.note(event)
    assert (state.num_steps, state.reward, state.policy_version) == (2, 0.75, 1)
    assert (state.workers["w"], state.metrics["w"]) == (beat, report)
    state.note(MetricsReported(worker_id="w", role="critic", policy_version=2, values={"value_loss": 0.25}))
    assert (state.metrics["w"], state.critic_figures) == (report, {1: {"value_loss": 0.25}})
    state.note(published(0))
    assert state.policy_version == 1


def test_run_state_keeps_of_a_step_what_is_shown_and_none_of_its_samples() -> None:
    of_samples = {"prompt_group_ids": ["a"], "sample_ids": ["a/0", "a/1"], "staleness_counts": [1, 1], "offsets": np.arange(2)}
    state, step = RunState(), committed(0, figures={"reward_mean": 0.75}, **of_samples)
    state.note(step)
    (kept,) = state.steps
    assert (kept.train_step, kept.figures, kept.phase_seconds, kept.weights_digest) == (0, step.figures, step.phase_seconds, step.weights_digest)
    assert (kept.sample_ids, kept.prompt_group_ids, kept.consumed, len(kept.offsets)) == ([], [], [], 0)
    assert num_samples(kept) == 2


def test_run_state_counts_each_end_once_and_failures_in_a_row() -> None:
    state = RunState()
    for index, outcome in enumerate([Outcome.FAILED, Outcome.FAILED, Outcome.TRAINED, Outcome.FAILED, Outcome.EXPIRED, Outcome.FAILED]):
        for _ in range(2):
            state.note(ended(f"000000-{index:04d}-0", outcome, reason=f"reason {index}"))
    assert state.outcomes == {"failed": 4, "trained": 1, "expired": 1}
    assert (state.failed_in_a_row, state.last_failure) == (2, "reason 5")


def test_run_state_ends_with_a_stop_for_all_only() -> None:
    state = RunState()
    state.note(RunCommanded(command=Command.STOP, role="reward", reason="scale down"))
    state.note(RunCommanded(command=Command.PAUSE, reason="wait"))
    assert state.ended is None
    state.note(RunCommanded(command=Command.STOP, reason="goal", succeeded=True))
    assert state.ended is not None
    assert state.ended.succeeded


def not_finite(worker_id: str, step: int, *, at: int) -> MetricsReported:
    return MetricsReported(worker_id=worker_id, role=worker_id[:-2], policy_version=step, values={"steps_not_finite": 1.0}, reported_at=at)


def test_step_is_lost_when_it_is_not_finite_twice_at_the_same_worker_since_the_run_was_taken_up() -> None:
    state = RunState()
    for report in (not_finite("trainer-0", 7, at=10), not_finite("trainer-1", 7, at=11), not_finite("trainer-0", 8, at=12)):
        state.note(report)
        assert state.step_lost is None
    state.note(again := not_finite("trainer-0", 7, at=13))
    assert state.step_lost is again
    assert state.metrics == {}
    state.note(RunCommanded(command=Command.RESUME, reason="taken up", commanded_at=20))
    assert state.step_lost is None


def test_run_is_paused_until_it_is_resumed() -> None:
    state = RunState()
    state.note(RunCommanded(command=Command.PAUSE, role="reward", reason="one role"))
    assert not state.is_paused
    state.note(RunCommanded(command=Command.PAUSE, reason="maintenance"))
    assert state.is_paused
    state.note(RunCommanded(command=Command.RESUME, reason="done"))
    assert not state.is_paused
