"""When a checkpoint is taken: by steps, and by time where steps are long."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from run_events import train_step

from relax_events.config import TrainerConfig
from relax_events.training import critic_learning
from relax_events.training.checkpoint import checkpoints
from relax_events.training.checkpoint.checkpoints import CheckpointSchedule
from relax_events.training.critic_learning import CriticLearner


@pytest.mark.parametrize(
    ("policy_version", "seconds", "is_due"),
    [(50, 1.0, True), (51, 1.0, False), (51, 899.0, False), (51, 900.0, True), (100, 0.0, True)],
)
def test_checkpoint_is_due_by_steps_or_by_time(
    policy_version: int, seconds: float, is_due: bool
) -> None:
    assert TrainerConfig().checkpoint_is_due(policy_version, seconds=seconds) is is_due


@pytest.mark.parametrize("of_first", [True, False])
def test_all_ranks_follow_the_checkpoint_clock_of_rank_zero(
    of_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints.time, "monotonic", lambda: 1000.0)
    reported: list[bytes | None] = []

    def broadcast(data: bytes | None) -> bytes:
        reported.append(data)
        return bytes([of_first])

    def rank(number: int, *, begun: float) -> Any:
        ranks = SimpleNamespace(rank=number, size=2, broadcast=broadcast)
        made = CheckpointSchedule(SimpleNamespace(), ranks, TrainerConfig())  # type: ignore[arg-type]
        made._started_at = begun
        return made

    first, other = (
        rank(0, begun=0.0 if of_first else 900.0),
        rank(1, begun=900.0 if of_first else 0.0),
    )
    assert [one._is_due(7) for one in (first, other)] == [of_first, of_first]
    assert reported == [bytes([of_first]), None]


@pytest.mark.parametrize(
    ("version", "now", "skipped", "is_pending", "is_begun"),
    [
        (51, 1899.0, 0, False, False),
        (51, 1900.0, 0, False, True),
        (50, 1001.0, 0, False, True),
        (51, 1900.0, 1, False, False),  # the next one to start counts the skipped updates again
        (51, 1900.0, 0, True, False),
    ],
)
def test_critic_begins_a_checkpoint_by_steps_or_by_time(
    monkeypatch: pytest.MonkeyPatch,
    version: int,
    now: float,
    skipped: int,
    is_pending: bool,
    is_begun: bool,
) -> None:
    monkeypatch.setattr(critic_learning.time, "monotonic", lambda: now)
    saved: list[dict[str, Any]] = []
    critic = SimpleNamespace(is_saving=is_pending, poll_checkpoint=lambda: None)

    def save(extra: dict[str, Any]) -> None:
        saved.append(extra)
        critic.is_saving = True

    critic.save = save
    learning: Any = CriticLearner.__new__(CriticLearner)
    learning._worker = SimpleNamespace(
        config=SimpleNamespace(trainer=TrainerConfig()),
        lifecycle=SimpleNamespace(transfer=lambda _: nullcontext()),
    )
    learning.critic, learning._checkpoint_begun = critic, 1000.0
    learning._consumed, learning._consecutive_skips = {3: 7, 0: 5}, skipped
    for _ in range(
        2
    ):  # the time counts from the newest checkpoint on, and none begins next to one that is being written
        learning._save_checkpoint(train_step(version - 1, at_seconds=1.0))
    assert [one["consumed"] for one in saved] == [[(0, 5), (3, 7)]] * is_begun
    assert learning._checkpoint_begun == (now if is_begun else 1000.0)
