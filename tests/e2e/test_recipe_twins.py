"""Twins of recipes run to the end: the same file, a tiny model of its family, two steps."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest
from command_line import Relax, report_of

from tests.recipes import RECIPES, make_twin


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", RECIPES)
def test_twin_of_a_recipe_runs_to_the_end(
    name: str, relax: Relax, bootstrap_servers: str, run_id: str, tmp_path: Path
) -> None:
    run_file = tmp_path / "twin.json"
    twin = make_twin(name, tmp_path, run_id=run_id, bootstrap_servers=bootstrap_servers)
    run_file.write_bytes(orjson.dumps(twin))
    made = relax("models", "prepare", run_file)
    assert made.code == 0, made.err
    ended = relax("run", run_file, timeout_seconds=600)
    assert ended.code == 0, ended.err[-4000:]
    report = report_of(tmp_path, run_id)
    assert report["num_steps"] == 2
    assert report["outcomes"]["trained"] == 4
    assert report["outcomes"]["failed"] == 0
    balanced = relax("ledger", "check", run_file)
    assert balanced.code == 0, balanced.out + balanced.err
