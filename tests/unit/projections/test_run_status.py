"""The status of a run, from its commands and the age of its heartbeats."""

from __future__ import annotations

import pytest

from relax_events.config import WorkersConfig
from relax_events.events.parts import Command, WorkerState
from relax_events.events.types import RunCommanded, RunDescribed
from relax_events.projections.run_state import RunState
from relax_events.projections.run_status import (
    RunStatus,
    decide_status,
    find_live_workers,
    find_possible_writers,
)
from tests.unit.run_events import make_heartbeat

SECOND = 1_000_000


def describe(run_id: str, *, at_seconds: float) -> RunDescribed:
    return RunDescribed(
        run_id=run_id,
        config="{}",
        config_digest="",
        package_version="",
        described_at=int(at_seconds * SECOND),
    )


@pytest.mark.parametrize(
    ("seconds", "settings", "is_live"),
    [
        (29.0, {}, True),
        (31.0, {}, False),
        (31.0, {"heartbeat_seconds": 4.0}, True),  # ten heartbeats
        (41.0, {"heartbeat_seconds": 4.0}, False),
        (6.0, {"heartbeat_timeout_seconds": 5.0}, False),  # it counts as hung
    ],
)
def test_worker_is_alive_until_its_heartbeats_are_missing(
    seconds: float, settings: dict[str, float], is_live: bool
) -> None:
    state, workers = RunState(), WorkersConfig(**settings)  # type: ignore[arg-type]
    state.apply(make_heartbeat("trainer-0", at_seconds=1000.0))
    now = int((1000 + seconds) * SECOND)
    assert list(find_live_workers(state, workers, now=now)) == ["trainer-0"] * is_live
    expected = RunStatus.RUNNING if is_live else RunStatus.INTERRUPTED
    assert decide_status(state, workers, now=now) is expected


def test_stopped_worker_is_neither_alive_nor_a_possible_writer() -> None:
    state, workers = RunState(), WorkersConfig()
    state.apply(make_heartbeat("trainer-0", at_seconds=1000.0, state=WorkerState.STOPPED))
    assert find_live_workers(state, workers, now=1001 * SECOND) == {}
    assert find_possible_writers(state, workers, now=1001 * SECOND) == {}
    assert decide_status(state, workers, now=1001 * SECOND) is RunStatus.INTERRUPTED


def test_silent_worker_may_write_until_it_would_be_killed() -> None:
    state, workers = RunState(), WorkersConfig()
    state.apply(make_heartbeat("trainer-0", at_seconds=1000.0))
    assert find_live_workers(state, workers, now=1060 * SECOND) == {}
    assert list(find_possible_writers(state, workers, now=1599 * SECOND)) == ["trainer-0"]
    assert find_possible_writers(state, workers, now=1600 * SECOND) == {}


def test_copied_heartbeats_of_an_imported_run_do_not_count() -> None:
    state, workers = RunState(), WorkersConfig()
    state.apply(describe("source", at_seconds=900.0))
    state.apply(describe("source", at_seconds=950.0))
    for worker_id in ("trainer-0", "reward-0"):
        state.apply(make_heartbeat(worker_id, at_seconds=1000.0))
    assert len(find_possible_writers(state, workers, now=1010 * SECOND)) == 2
    state.apply(describe("copy", at_seconds=1005.0))
    assert find_possible_writers(state, workers, now=1010 * SECOND) == {}
    assert decide_status(state, workers, now=1010 * SECOND) is RunStatus.INTERRUPTED
    state.apply(make_heartbeat("trainer-0", at_seconds=1009.0))
    state.apply(describe("copy", at_seconds=1010.0))
    assert list(find_possible_writers(state, workers, now=1011 * SECOND)) == ["trainer-0"]
    assert decide_status(state, workers, now=1011 * SECOND) is RunStatus.RUNNING


def test_run_has_ended_although_its_workers_still_drain() -> None:
    state = RunState()
    state.apply(make_heartbeat("trainer-0", at_seconds=1000.0))
    state.apply(RunCommanded(command=Command.STOP, reason="done"))
    assert decide_status(state, WorkersConfig(), now=1001 * SECOND) is RunStatus.ENDED
