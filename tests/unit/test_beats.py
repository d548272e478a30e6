"""Beats come from the work loop: once an interval, and at once when the state changes."""

from __future__ import annotations

import os

import pytest

from relax_events.events.parts import WorkerState
from relax_events.events.types import MetricsReported, WorkerBeat
from relax_events.pipeline.beats import REPORT_EVERY_BEATS, Beats


class Clocked:
    """Beats under a clock that the test moves, with what they sent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr("relax_events.pipeline.beats.time.monotonic", lambda: self.now)
        self.sent: list[WorkerBeat | MetricsReported] = []
        self.beats = Beats(self.sent.append, worker_id="reward-0", role="reward", interval_seconds=1.0)

    def tick(self, state: WorkerState, *, after: float = 0.0) -> None:
        self.now += after
        self.beats.tick(state)


@pytest.fixture
def clocked(monkeypatch: pytest.MonkeyPatch) -> Clocked:
    return Clocked(monkeypatch)


def states(clocked: Clocked) -> list[WorkerState]:
    return [event.state for event in clocked.sent if isinstance(event, WorkerBeat)]


def test_beats_come_once_an_interval_while_a_worker_changes_between_idle_and_working(clocked: Clocked) -> None:
    clocked.tick(WorkerState.STARTING)
    clocked.tick(WorkerState.WORKING, after=0.5)
    for state in (WorkerState.IDLE, WorkerState.WORKING, WorkerState.IDLE):
        clocked.tick(state, after=0.1)
    assert states(clocked) == [WorkerState.STARTING, WorkerState.WORKING]
    clocked.tick(WorkerState.IDLE, after=0.8)
    assert states(clocked)[2:] == [WorkerState.IDLE]


def test_change_to_draining_is_told_at_once(clocked: Clocked) -> None:
    clocked.tick(WorkerState.WORKING)
    for state in (WorkerState.DRAINING, WorkerState.STOPPED):
        clocked.tick(state, after=0.01)
    assert states(clocked) == [WorkerState.WORKING, WorkerState.DRAINING, WorkerState.STOPPED]


def test_beat_carries_what_the_worker_did(clocked: Clocked) -> None:
    before = clocked.beats.started_at
    clocked.beats.progress(3, seconds=0.5)
    clocked.beats.progress(4, seconds=0.5)
    clocked.beats.policy_version, clocked.beats.metrics_port, clocked.beats.num_in_flight = 5, 9090, 2
    clocked.tick(WorkerState.WORKING)
    (beat,) = clocked.sent
    assert isinstance(beat, WorkerBeat)
    assert (beat.num_processed, beat.num_in_flight, beat.policy_version, beat.metrics_port, beat.pid) == (7, 2, 5, 9090, os.getpid())
    assert beat.last_progress_at >= before
    assert clocked.beats.seconds_since_beat == 0.0
    clocked.now += 3.0
    assert clocked.beats.seconds_since_beat == 3.0


def test_every_few_beats_throughput_is_reported(clocked: Clocked) -> None:
    for _ in range(2 * REPORT_EVERY_BEATS):
        clocked.beats.progress(10, seconds=0.5)
        clocked.tick(WorkerState.WORKING, after=2.0)
    reports = [event for event in clocked.sent if isinstance(event, MetricsReported)]
    assert [report.values for report in reports] == [{"records_per_second": 5.0, "busy_ratio": 0.25}] * 2


def test_beat_tells_since_when_there_was_work_without_progress_and_waiting_is_none(clocked: Clocked, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 5_000_000
    monkeypatch.setattr("relax_events.pipeline.beats.now_micros", lambda: now)

    def told(state: WorkerState) -> int | None:
        clocked.tick(state, after=1.0)
        beat = clocked.sent[-1] if isinstance(clocked.sent[-1], WorkerBeat) else clocked.sent[-2]
        assert isinstance(beat, WorkerBeat)
        return beat.busy_since

    assert told(WorkerState.IDLE) is None
    assert told(WorkerState.WORKING) == 5_000_000
    now = 9_000_000
    assert told(WorkerState.WORKING) == 5_000_000
    assert clocked.beats.busy_seconds == 4.0
    clocked.beats.advance_to(0)
    assert told(WorkerState.WORKING) == 5_000_000, "as many tokens as before"
    clocked.beats.advance_to(7)
    assert told(WorkerState.WORKING) == 9_000_000
    assert told(WorkerState.IDLE) is None
    assert clocked.beats.busy_seconds == 0.0


def test_time_of_loading_is_no_time_without_work(clocked: Clocked, monkeypatch: pytest.MonkeyPatch) -> None:
    clocked.tick(WorkerState.STARTING)
    loaded_at = clocked.beats.started_at + 1_800_000_000
    monkeypatch.setattr("relax_events.pipeline.beats.now_micros", lambda: loaded_at)
    clocked.tick(WorkerState.IDLE, after=1800.0)
    monkeypatch.setattr("relax_events.pipeline.beats.now_micros", lambda: loaded_at + 5_000_000)
    clocked.tick(WorkerState.IDLE, after=5.0)
    assert [event.last_progress_at for event in clocked.sent if isinstance(event, WorkerBeat)][1:] == [loaded_at, loaded_at]
