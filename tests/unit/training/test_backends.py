"""The trainer backend of a run: found by name, and checked against the run's requirements."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from relax_events.errors import ConfigError
from relax_events.training.backend.factory import open_backend
from relax_events.training.ranks import SingleRank

OWN = """
class Own:
    experts = None

    def __init__(self, config, *, ranks):
        self.config = config
"""


def test_backend_without_routing_replay_is_rejected_when_it_is_required(
    make_run_config: Any, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    backend = f"{tmp_path / 'own.py'}:Own"
    plain = make_run_config(trainer={"backend": backend})
    assert open_backend(plain, SingleRank()).config is plain  # type: ignore[attr-defined]
    asking = make_run_config(trainer={"backend": backend}, model={"routing_replay": "rollout"})
    with pytest.raises(
        ConfigError,
        match=r"needs a backend that replays the routing .* trainer.backend = '.*own.py:Own' does not",
    ):
        open_backend(asking, SingleRank())
