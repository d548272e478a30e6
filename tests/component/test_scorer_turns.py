"""Scorers of two roles in one process leave the device when none has work, and share one turn."""

from __future__ import annotations

from pathlib import Path

import pytest

from relax_events.errors import ConfigError
from relax_events.roles.scorer_turns import ScorerTurns
from relax_events.runtime.device_turn import DeviceTurn

SECONDS = 100.0


class CountingScorer:
    """Counts where its weights are."""

    def __init__(self) -> None:
        self.is_away, self.num_moves = False, 0

    def offload_to(self, folder: Path) -> None:
        self.folder = folder

    def move_away(self) -> int:
        assert not self.is_away
        self.is_away, self.num_moves = True, self.num_moves + 1
        return 8

    def bring_back(self) -> None:
        assert self.is_away
        self.is_away = False


def test_roles_share_a_turn_which_ends_when_none_has_work(tmp_path: Path) -> None:
    path, scorer = tmp_path / "cpu.lock", CountingScorer()
    turns = ScorerTurns(turn := DeviceTurn(path, alone=True), folder=tmp_path)
    assert not turns.may_work("reference", has_work=False)
    turns.may_work("reference", has_work=True)
    assert turn.wait(SECONDS)
    assert turns.may_work("reference", has_work=True)
    turns.add(scorer)
    assert turns.may_work("actor-forward", has_work=True)
    turns.may_work("reference", has_work=False)
    assert not scorer.is_away, "the other role works"

    trainer = DeviceTurn(path, alone=True)
    assert not trainer.wait(0.1)
    turns.may_work("actor-forward", has_work=False)
    assert scorer.is_away
    assert trainer.wait(SECONDS)
    assert not turns.may_work("actor-forward", has_work=True)
    assert not turn.wait(0.1)
    assert scorer.is_away, "the trainer works"
    trainer.end()
    assert turn.wait(SECONDS)
    assert turns.may_work("actor-forward", has_work=True)
    assert (scorer.is_away, scorer.num_moves) == (False, 1)


def test_scorers_that_can_not_leave_are_refused(tmp_path: Path) -> None:
    ScorerTurns(None, folder=tmp_path).add(object())
    turns = ScorerTurns(DeviceTurn(tmp_path / "cpu.lock", alone=True), folder=tmp_path)
    with pytest.raises(ConfigError, match=r"workers\.hybrid = false"):
        turns.add(object())
