"""When checkpoints are begun: by steps, and by time where steps are long."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from relax_events.config import TrainerConfig
from workers import trainer
from workers.trainer import TrainLoop


@pytest.mark.parametrize(
    ("policy_version", "seconds", "is_due"),
    [(50, 1.0, True), (51, 1.0, False), (51, 899.0, False), (51, 900.0, True), (100, 0.0, True)],
)
def test_checkpoint_is_due_by_steps_or_by_time(policy_version: int, seconds: float, is_due: bool) -> None:
    assert TrainerConfig().checkpoint_is_due(policy_version, seconds=seconds) is is_due


@pytest.mark.parametrize("of_first", [True, False])
def test_ranks_go_by_the_clock_of_the_first(of_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer.time, "monotonic", lambda: 1000.0)
    told: list[bytes | None] = []

    def broadcast(data: bytes | None) -> bytes:
        told.append(data)
        return bytes([of_first])

    def rank(number: int, *, begun: float) -> Any:
        ranks = SimpleNamespace(rank=number, size=2, broadcast=broadcast)
        return SimpleNamespace(_ranks=ranks, _config=SimpleNamespace(trainer=TrainerConfig()), _checkpoint_begun=begun)

    first, other = rank(0, begun=0.0 if of_first else 900.0), rank(1, begun=900.0 if of_first else 0.0)
    assert [TrainLoop._checkpoint_is_due(one, 7) for one in (first, other)] == [of_first, of_first]
    assert told == [bytes([of_first]), None]
