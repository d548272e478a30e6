"""The log that the ledger is measured on is one of a valid run, with all that a ledger checks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import ledger
from benchmarks.ledger import Generation
from relax_events.projections.ledger_findings import Rule


def test_log_is_of_a_valid_run_and_is_read_whole(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ledger, "STEPS_PER_BLOCK", 2)
    num_samples = ledger.write_log(tmp_path / "log", num_samples=2049, num_tokens=8)
    assert num_samples == 3 * 1024
    result = ledger.read_log(tmp_path / "log")
    assert (result["problems"], result["unverified"]) == ([], [])
    assert result["num_samples"] == num_samples
    assert result["seconds"] > 0


def test_rewards_and_advantages_of_the_log_are_checked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    generate = ledger.generate

    def alter(generator: np.random.Generator, step: int, index: int, **sizes: int) -> Generation:
        generation = generate(generator, step, index, **sizes)
        generation.ready[0] = replace(generation.ready[0], reward=0.25)
        return generation

    monkeypatch.setattr(ledger, "generate", alter)
    ledger.write_log(tmp_path / "log", num_samples=1, num_tokens=8)
    problems = " ".join(ledger.read_log(tmp_path / "log")["problems"])
    assert Rule.NOT_SCORED in problems
    assert Rule.OTHER_ADVANTAGES in problems


def test_rows_compare_readings_of_the_same_round() -> None:
    before = [{"seconds": 2.0, "num_bytes": 10e6, "num_samples": 1000}] * 3
    after = [
        {"seconds": seconds, "num_bytes": 15e6, "num_samples": 1000} for seconds in (3.0, 2.0, 4.0)
    ]
    assert ledger.rows({"before": before, "this": after})[1] == {
        "ledger": "this",
        "processor s": "3.0",
        "processor s, of the first": "1.50",
        "MB": "15.0",
        "MB, of the first": "1.50",
        "us a sample": "3000.0",
    }
