"""TRL's current results in its own environment equal the reference file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import environment
from tests.trl_reference import FILE, in_environment

MADE = environment.ROOT / ".relax" / "trl" / "requirements.txt"


def numbers(tree: Any) -> list[float]:
    parts = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else None
    return (
        [float(tree)] if parts is None else [number for part in parts for number in numbers(part)]
    )


def keys(tree: Any) -> Any:
    return {name: keys(part) for name, part in tree.items()} if isinstance(tree, dict) else None


@pytest.mark.long
def test_reference_file_matches_the_results_of_trl(tmp_path: Path) -> None:
    if not MADE.exists():
        pytest.skip("TRL is not installed; run `make trl`")
    in_environment(tmp_path / "trl.json")
    computed, kept = json.loads((tmp_path / "trl.json").read_text()), json.loads(FILE.read_text())
    assert keys(computed) == keys(kept)
    assert computed.pop("trl") == kept.pop("trl"), "run python -m tests.trl_reference"
    assert numbers(computed) == pytest.approx(numbers(kept), rel=1e-9, abs=1e-12)
