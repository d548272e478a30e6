"""Where a step's time goes, also what is spent after its metrics were written."""

from relax_events.training.step_record import PhaseTimer


def test_commit_after_the_figures_counts_to_the_next_step():
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


def test_step_that_was_cut_short_leaves_nothing_to_the_next():
    phases = PhaseTimer()
    with phases.measure("wait"):
        pass
    assert dict(phases.next_step().seconds) == {}
