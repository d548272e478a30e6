"""The phase times of a step, including time after its metrics were written."""

from relax_events.training.step_record import PhaseTimer


def test_commit_time_after_the_snapshot_counts_towards_the_next_step():
    phases = PhaseTimer()
    with phases.measure("update"):
        pass
    written = phases.snapshot()
    with phases.measure("commit"):
        pass
    assert set(written) == {"update"}
    following = phases.next_step()
    assert set(following.seconds) == {"commit"}
    assert following.seconds["commit"] == phases.seconds["commit"]


def test_phase_times_of_an_aborted_step_are_discarded():
    phases = PhaseTimer()
    with phases.measure("wait"):
        pass
    assert dict(phases.next_step().seconds) == {}
