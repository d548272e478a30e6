"""A short soak of a fixed seed: faults one after another, the ledger at the end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import orjson
import pytest
import soak
from harness import environment

TESTS = Path(__file__).parents[1]
QUICK = ("kill-workers", "kill-broker", "poison", "damage-objects", "oversize")  # what does not start everything again


@pytest.mark.long
def test_short_soak_breaks_no_promise(tmp_path: Path) -> None:
    summary_file = tmp_path / "summary.json"
    ended = subprocess.run(
        [
            *(sys.executable, soak.__file__, "--minutes", "0.25", "--seed", "5"),
            *("--folder", str(tmp_path / "soak"), "--summary", str(summary_file)),
            *(word for kind in QUICK for word in ("--fault", kind)),
        ],
        cwd=tmp_path,
        env=environment() | {"PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=220,
        check=False,
    )
    print(ended.stdout)
    summary = orjson.loads(summary_file.read_bytes())
    assert (ended.returncode, summary["violations"]) == (0, [])
    assert summary["num_faults"] == sum(figures["recovered"] for figures in summary["faults"].values()) > 0
    (run,) = summary["runs"]
    assert run["ledger"]["samples_trained"] > run["ledger"]["samples_lost"] == run["ledger"]["samples_trained_twice"] == 0
    assert list((tmp_path / "soak" / "runs").iterdir()) == [], "a run that ended well is deleted"


def test_violation_gives_exit_code_6_and_keeps_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(self: soak.Soak) -> None:
        self.injected += [soak.Injected("poison", "3 records", seconds) for seconds in (2.0, 4.0, None)]
        self.violations.append("soak-0-0: sample trained twice: 1")

    monkeypatch.setattr(soak.Soak, "run", run)
    monkeypatch.setattr(soak.signal, "signal", lambda *_: None)
    assert soak.main(["--folder", str(tmp_path), "--summary", str(tmp_path / "summary.json")]) == 6
    figures = orjson.loads((tmp_path / "summary.json").read_bytes())["faults"]["poison"]
    assert {name: figures[name] for name in ("injected", "recovered", "seconds_p50", "seconds_max")} == {
        "injected": 3,
        "recovered": 2,
        "seconds_p50": 3.0,
        "seconds_max": 4.0,
    }
    printed = capsys.readouterr().out
    assert "VIOLATED  soak-0-0: sample trained twice: 1" in printed
    assert f"are kept in {tmp_path}" in printed
