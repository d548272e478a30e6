"""A run that starts with another run's weights: its first checkpoint is a whole model's, and may
take as long as one.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from relax_events.config import TrainerConfig
from relax_events.errors import ConfigError
from relax_events.training.backend.state import TrainerState
from relax_events.training.replay import start_weights
from relax_events.training.replay.start_weights import load_parent_weights
from workers.trainer import lay_out_ranks


def test_first_checkpoint_has_the_transfer_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    named: list[str] = []
    state = TrainerState(policy_version=0, tensors={})
    pending = SimpleNamespace(wait=waited.append)
    worker: Any = SimpleNamespace(
        config=SimpleNamespace(
            first_version=3,
            health=SimpleNamespace(start_seconds=5_000.0),
            model=SimpleNamespace(lora=None),
        ),
        lifecycle=SimpleNamespace(transfer=lambda name: named.append(name) or nullcontext()),
    )
    backend: Any = SimpleNamespace(state=lambda: state, load_state=lambda _: None)
    checkpoints: Any = SimpleNamespace(save=lambda *_, **__: pending)
    monkeypatch.setattr(
        start_weights,
        "read_initial_state",
        lambda *_, **__: SimpleNamespace(state=state, kind="weights"),
    )
    source: Any = SimpleNamespace(
        config=SimpleNamespace(run=SimpleNamespace(id="old"), model=SimpleNamespace(lora=None))
    )
    ranks: Any = SimpleNamespace()
    load_parent_weights(source, worker, backend, ranks=ranks, checkpoints=checkpoints)
    assert (waited, named) == ([5_000.0], ["write the first checkpoint"])


@pytest.mark.parametrize(("num_ranks", "was"), [(1, "1 was started"), (4, "4 were started")])
def test_other_number_of_ranks_than_the_run_files_is_refused(num_ranks: int, was: str) -> None:
    trainer = TrainerConfig(ranks=2)
    assert lay_out_ranks(trainer, 2).num_ranks == 2
    with pytest.raises(ConfigError, match=rf"trainer.ranks = 2, and {was}; start as many"):
        lay_out_ranks(trainer, num_ranks)
