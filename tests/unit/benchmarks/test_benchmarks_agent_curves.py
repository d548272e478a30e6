"""The page of the examples' learning curves follows from the reports of whole runs alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import agent_curves

REPAIR_STEPS = 40


def report_of(rewards: list[float]) -> dict[str, Any]:
    steps = list(range(len(rewards)))
    return {"curves": {"train_step": steps, "reward_mean": rewards}, "wall_seconds": 1234.4}


def test_page_compares_the_first_steps_with_the_last(tmp_path: Path) -> None:
    rewards = [0.25] * 5 + [0.4] * (REPAIR_STEPS - 10) + [0.75] * 5
    example = agent_curves.example_of("repair", report_of(rewards))
    agent_curves.publish([example], folder=tmp_path)
    page = (tmp_path / "agent-curves.md").read_text()
    assert "| `configs/repair.toml` | 40 | 48 | 0.25 | 0.75 | 1,234 |" in page
    assert "1 of 1 examples end above their beginning." in page
    assert "<svg" in (tmp_path / "agent-curves.svg").read_text()
    assert (
        json.loads((tmp_path / "agent-curves.json").read_bytes())["data"][0]["rewards"] == rewards
    )


def test_unfinished_run_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="the run of repair has 27 of 40 steps; finish it with"):
        agent_curves.example_of("repair", report_of([0.5] * 27))
