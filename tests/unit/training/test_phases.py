"""The phase times of a step, including time after its metrics were written."""

import pytest

from relax_events.training.step_record import PhaseTimer


def test_commit_time_after_the_snapshot_counts_towards_the_next_step():
    phases = PhaseTimer()
    with phases.measure("update"):
        pass
    written = phases.snapshot()
    with phases.measure("commit"):
        pass
    assert set(written) == {"update", "other"}
    following = phases.next_step()
    assert set(following.seconds) == {"commit"}
    assert following.seconds["commit"] == phases.seconds["commit"]


def test_phase_times_of_an_aborted_step_are_discarded():
    phases = PhaseTimer()
    with phases.measure("wait"):
        pass
    assert dict(phases.next_step().seconds) == {}


def test_phases_of_a_step_add_up_to_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for the engines' turn is in no measured phase, and was missing."""
    clock = iter([100.0, 101.0, 104.0, 106.0, 106.0, 107.0, 110.0, 112.0])
    monkeypatch.setattr("relax_events.training.step_record.time.monotonic", lambda: next(clock))
    phases = PhaseTimer()  # at 100
    with phases.measure("wait"):  # 101 to 104
        pass
    assert phases.snapshot() == {"wait": 3.0, "other": 3.0}  # at 106
    following = phases.next_step()
    with following.measure("update"):  # 107 to 110
        pass
    assert following.snapshot() == {"update": 3.0, "other": 3.0}  # at 112, 6 s after the first
