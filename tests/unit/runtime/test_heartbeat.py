"""Heartbeats come from the work loop: once an interval, and at once when the state changes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from relax_events.events.parts import WorkerState
from relax_events.events.types import MetricsReported, WorkerHeartbeat
from relax_events.runtime.heartbeat import REPORT_EVERY_HEARTBEATS, Heartbeat


class Clocked:
    """Heartbeats under a clock that the test moves, with what they sent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr("relax_events.runtime.heartbeat.time.monotonic", lambda: self.now)
        self.sent: list[WorkerHeartbeat | MetricsReported] = []
        self.heartbeat = Heartbeat(
            self.sent.append, worker_id="reward-0", role="reward", interval_seconds=1.0
        )

    def tick(self, state: WorkerState, *, after: float = 0.0) -> None:
        self.now += after
        self.heartbeat.tick(state)


@pytest.fixture
def clocked(monkeypatch: pytest.MonkeyPatch) -> Clocked:
    return Clocked(monkeypatch)


def states(clocked: Clocked) -> list[WorkerState]:
    return [event.state for event in clocked.sent if isinstance(event, WorkerHeartbeat)]


def test_heartbeats_keep_their_interval_when_a_worker_alternates_idle_and_working(
    clocked: Clocked,
) -> None:
    clocked.tick(WorkerState.STARTING)
    clocked.tick(WorkerState.WORKING, after=0.5)
    for state in (WorkerState.IDLE, WorkerState.WORKING, WorkerState.IDLE):
        clocked.tick(state, after=0.1)
    assert states(clocked) == [WorkerState.STARTING, WorkerState.WORKING]
    clocked.tick(WorkerState.IDLE, after=0.8)
    assert states(clocked)[2:] == [WorkerState.IDLE]


def test_change_to_draining_sends_a_heartbeat_immediately(clocked: Clocked) -> None:
    clocked.tick(WorkerState.WORKING)
    for state in (WorkerState.DRAINING, WorkerState.STOPPED):
        clocked.tick(state, after=0.01)
    assert states(clocked) == [WorkerState.WORKING, WorkerState.DRAINING, WorkerState.STOPPED]


def test_heartbeat_contains_the_workers_counts_and_version(clocked: Clocked) -> None:
    before = clocked.heartbeat.started_at
    clocked.heartbeat.record_processed(3, seconds=0.5)
    clocked.heartbeat.record_processed(4, seconds=0.5)
    clocked.heartbeat.set_policy_version(5)
    clocked.heartbeat.set_metrics_port(9090)
    clocked.heartbeat.set_in_flight(2)
    clocked.tick(WorkerState.WORKING)
    (heartbeat,) = clocked.sent
    assert isinstance(heartbeat, WorkerHeartbeat)
    assert (
        heartbeat.num_processed,
        heartbeat.num_in_flight,
        heartbeat.policy_version,
        heartbeat.metrics_port,
        heartbeat.pid,
    ) == (7, 2, 5, 9090, os.getpid())
    assert heartbeat.last_progress_at >= before
    assert clocked.heartbeat.seconds_since_tick == 0.0
    clocked.now += 3.0
    assert clocked.heartbeat.seconds_since_tick == 3.0


def test_throughput_is_reported_every_few_heartbeats(clocked: Clocked) -> None:
    for _ in range(2 * REPORT_EVERY_HEARTBEATS):
        clocked.heartbeat.record_processed(10, seconds=0.5)
        clocked.tick(WorkerState.WORKING, after=2.0)
    reports = [event for event in clocked.sent if isinstance(event, MetricsReported)]
    values = [dict(report.values) for report in reports]
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    resident = int(status["VmRSS"].split()[0]) * 1024
    assert all(report.pop("peak_memory_bytes") >= 0.9 * resident for report in values)
    assert values == [{"records_per_second": 5.0, "busy_ratio": 0.25}] * 2


def test_throughput_is_reported_while_new_prompt_groups_are_listed_early(clocked: Clocked) -> None:
    for number in range(100):
        clocked.heartbeat.set_in_flight(1, prompt_groups=[f"{number:06}-0000-0"])
        clocked.tick(WorkerState.WORKING, after=0.15)
    heartbeats = states(clocked)
    reports = [event for event in clocked.sent if isinstance(event, MetricsReported)]
    assert len(heartbeats) == 100
    assert len(reports) >= 15 // REPORT_EVERY_HEARTBEATS - 1


def newest(clocked: Clocked) -> WorkerHeartbeat:
    return [event for event in clocked.sent if isinstance(event, WorkerHeartbeat)][-1]


def test_heartbeat_reports_time_without_progress_only_while_there_is_work(
    clocked: Clocked, monkeypatch: pytest.MonkeyPatch
) -> None:
    wall = 5_000_000
    monkeypatch.setattr("relax_events.runtime.heartbeat.now_micros", lambda: wall)

    def busy_micros(state: WorkerState, *, after: float = 1.0) -> int | None:
        clocked.tick(state, after=after)
        heartbeat = newest(clocked)
        return None if heartbeat.busy_since is None else heartbeat.sent_at - heartbeat.busy_since

    assert busy_micros(WorkerState.IDLE) is None
    assert busy_micros(WorkerState.WORKING) == 0
    wall -= 3_600_000_000  # a step of the wall clock makes no worker look stuck
    assert busy_micros(WorkerState.WORKING, after=4.0) == 4_000_000
    assert clocked.heartbeat.seconds_without_progress == 4.0
    clocked.heartbeat.advance_to(0)
    assert busy_micros(WorkerState.WORKING) == 5_000_000, "as many tokens as before"
    clocked.heartbeat.advance_to(7)
    assert busy_micros(WorkerState.WORKING) == 0
    assert busy_micros(WorkerState.IDLE) is None
    assert clocked.heartbeat.seconds_without_progress == 0.0


def test_loading_time_is_not_counted_as_time_without_progress(clocked: Clocked) -> None:
    clocked.tick(WorkerState.STARTING)
    ages = []
    for after in (1800.0, 5.0):
        clocked.tick(WorkerState.IDLE, after=after)
        ages.append(newest(clocked).sent_at - newest(clocked).last_progress_at)
    assert ages == [0, 5_000_000]


def inside(clocked: Clocked, *, after: float) -> WorkerHeartbeat | None:
    """Let time pass, and let the other thread check; return the heartbeat that it sent."""
    clocked.now += after
    num_sent = len(clocked.sent)
    clocked.heartbeat.send_inside_activity()
    return newest(clocked) if len(clocked.sent) > num_sent else None


def test_heartbeats_continue_during_a_long_call_with_its_name_and_deadline(
    clocked: Clocked,
) -> None:
    clocked.tick(WorkerState.IDLE)
    assert inside(clocked, after=100.0) is None, "between calls a loop that does not turn is silent"
    with clocked.heartbeat.activity("publish weights", deadline_seconds=60.0):
        assert inside(clocked, after=0.0) is not None
        assert inside(clocked, after=0.5) is None, "no heartbeat is due"
        heartbeat = inside(clocked, after=50.0)
    assert heartbeat is not None
    assert heartbeat.activity_since is not None
    assert heartbeat.activity_deadline_at is not None
    assert (heartbeat.activity, heartbeat.state, heartbeat.busy_since) == (
        "publish weights",
        WorkerState.WORKING,
        None,
    )
    assert (
        heartbeat.sent_at - heartbeat.activity_since,
        heartbeat.activity_deadline_at - heartbeat.sent_at,
    ) == (
        50_500_000,
        9_500_000,
    )
    clocked.tick(WorkerState.WORKING, after=1.0)
    assert (
        newest(clocked).activity,
        newest(clocked).activity_since,
        newest(clocked).activity_deadline_at,
    ) == ("", None, None)
    assert inside(clocked, after=100.0) is None


def test_only_a_completed_long_call_counts_as_progress_not_a_failed_or_waiting_one(
    clocked: Clocked,
) -> None:
    clocked.tick(WorkerState.WORKING)
    with clocked.heartbeat.activity(
        "wait for the other ranks", deadline_seconds=60.0, is_progress=False
    ):
        clocked.now += 10.0
        assert clocked.heartbeat.seconds_without_progress == 0.0, "its own deadline counts"
    assert clocked.heartbeat.seconds_without_progress == 10.0
    with (  # noqa: PT012 as it fails late
        pytest.raises(OSError, match="gone"),
        clocked.heartbeat.activity("load weights", deadline_seconds=60.0),
    ):
        clocked.now += 10.0
        raise OSError("gone")
    assert (clocked.heartbeat.seconds_without_progress, clocked.heartbeat.seconds_since_tick) == (
        20.0,
        0.0,
    )
    with clocked.heartbeat.activity("load weights", deadline_seconds=60.0):
        clocked.now += 10.0
    assert clocked.heartbeat.seconds_without_progress == 0.0


def test_progress_extends_the_deadline_of_the_inner_call_only(
    clocked: Clocked,
) -> None:
    def overdue() -> str:
        current = clocked.heartbeat.current_activity
        return current.name if current is not None and current.is_overdue else ""

    with (
        clocked.heartbeat.activity("start", deadline_seconds=30.0),
        clocked.heartbeat.activity("score samples", deadline_seconds=20.0),
    ):
        for _ in range(2):
            clocked.now += 14.0
            clocked.heartbeat.advance()
        assert overdue() == ""
        clocked.now += 3.0
        assert overdue() == "start", "progress inside does not move it"
    with clocked.heartbeat.activity("score samples", deadline_seconds=20.0):
        clocked.now += 21.0
        assert overdue() == "score samples"
    assert overdue() == ""
