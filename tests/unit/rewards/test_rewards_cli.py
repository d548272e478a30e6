"""`relax rewards` and the settings of the functions that it scores by."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from relax_events.cli.rewards import rewards
from relax_events.config import RewardConfig
from relax_events.errors import ConfigError
from relax_events.rewards.trial import replace_function

pytestmark = pytest.mark.unit


def test_list_names_every_reward_with_what_it_checks(capsys: pytest.CaptureFixture[str]) -> None:
    rewards()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 15
    assert next(line for line in lines if line.startswith("math ")).split(maxsplit=2)[1:] == [
        "samples",
        "Give 1 when the final answer equals a reference in mathematics, else 0.",
    ]
    rewards(output="json")
    found = {entry["name"]: entry["scores"] for entry in orjson.loads(capsys.readouterr().out)}
    assert (found["genrm"], found["genrm_pairwise"]) == ("samples", "prompt groups")


def test_show_prints_metadata_options_and_source(capsys: pytest.CaptureFixture[str]) -> None:
    rewards("ifeval")
    text = capsys.readouterr().out
    assert "instruction_id_list  ids such as" in text
    assert "\nFailures\nThe metadata name no instruction" in text
    assert "mode     Literal['strict', 'loose']  'strict'" in text
    assert "Source: Instruction-Following Evaluation" in text
    rewards("remote", output="json")
    options = {
        option["name"]: option for option in orjson.loads(capsys.readouterr().out)["options"]
    }
    assert options["url"]["is_required"]
    assert options["retries"]["default"] == 3


def test_show_describes_a_user_defined_reward_function(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "def rank(completions, *, answer, metadata, prompt, scale: float = 2.0):\n    "
        '"""Rank them."""\n'
    )
    rewards(f"{file}:rank")
    assert capsys.readouterr().out.startswith(f"{file}:rank: scores prompt groups\n\nRank them.\n")


def test_rescore_uses_run_options_only_for_the_runs_own_reward_function() -> None:
    given = {
        "function": "math",
        "options": {"box_only": True},
        "weights": {"a": 1.0},
        "routes": {"books": {"function": "f1"}},
    }
    run = RewardConfig.model_validate({**given, "timeout_seconds": 3, "processes": 2})
    same = replace_function(run, "math", ["box_only=false"])
    assert (same.options, same.weights, same.timeout_seconds, same.processes) == (
        {"box_only": False},
        {"a": 1.0},
        3,
        2,
    )
    other = replace_function(run, "remote", ["url=http://localhost:1", "retries=2"], workers=4)
    assert (other.options, other.weights, other.routes, other.processes) == (
        {"url": "http://localhost:1", "retries": 2},
        {},
        {},
        4,
    )
    assert same.routes == run.routes
    with pytest.raises(ConfigError, match="--option must be NAME=VALUE, got 'strict'"):
        replace_function(run, "remote", ["strict"])
