"""A short soak with a fixed seed: faults one after another, and the ledger check at the end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import orjson
import pytest
import soak
import soak_plugins
from harness import FaultRun, environment
from soak_faults import FAULTS

TESTS = Path(__file__).parents[1]
QUICK = (
    "kill-workers",
    "kill-broker",
    "poison",
    "damage-objects",
    "oversize",
)  # what does not start everything again
LONG_CALLS = ("slow-step", "hanging-verifier", "crash-loop")
NEIGHBOURS = ("shared-bucket", "endless-crash-loop")
SOAK_SECONDS = 1500
"""How long a soak may take on a busy machine: each of its waits has a bound of its own."""
PATIENCE = ("--patience", "4")  # the bounds on a quiet machine are measured by `make soak`


def soaked(folder: Path, *words: str, kinds: tuple[str, ...]) -> dict[str, Any]:
    """Soak in another process, and return the summary of a soak that found nothing."""
    summary_file = folder / "summary.json"
    ended = subprocess.run(
        [
            *(
                sys.executable,
                soak.__file__,
                "--folder",
                str(folder / "soak"),
                "--summary",
                str(summary_file),
                *words,
            ),
            *(word for kind in kinds for word in ("--fault", kind)),
        ],
        cwd=folder,
        env=environment() | {"PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SOAK_SECONDS,
        check=False,
    )
    print(ended.stdout)
    summary: dict[str, Any] = orjson.loads(summary_file.read_bytes())
    assert (ended.returncode, summary["violations"]) == (0, [])
    assert (
        summary["num_faults"]
        == sum(metrics["recovered"] for metrics in summary["faults"].values())
        > 0
    )
    for run in summary["runs"]:
        assert (
            run["ledger"]["samples_trained"]
            > run["ledger"]["samples_lost"]
            == run["ledger"]["samples_trained_twice"]
            == 0
        )
    assert list((folder / "soak" / "runs").iterdir()) == [], "a run that ended well is deleted"
    return summary


def test_soak_injects_every_fault_kind_once_before_repeating_any(tmp_path: Path) -> None:
    one, random = soak.Soak(tmp_path, seed=1, minutes=1.0), Random(1)
    anywhere = [kind for kind, fault in FAULTS.items() if not fault.ends_run]
    near = [kind for kind in anywhere if not FAULTS[kind].needs_link]
    sampled = [one._next_kind(near, random) for _ in range(5)]
    sampled += [one._next_kind(anywhere, random) for _ in range(len(anywhere) - 5)]
    assert sorted(sampled) == sorted(anywhere)
    again = [one._next_kind(near, random) for _ in near]
    assert sorted(again) == sorted(near)
    assert one._next_kind(near, random) in near
    assert set(one.due) >= set(anywhere) - set(near), "those of a link are still due"


@pytest.mark.long
@pytest.mark.timeout(SOAK_SECONDS + 60)
def test_short_soak_violates_no_guarantee(tmp_path: Path) -> None:
    assert (
        len(soaked(tmp_path, "--minutes", "0.25", "--seed", "5", *PATIENCE, kinds=QUICK)["runs"])
        == 1
    )


@pytest.mark.long
@pytest.mark.timeout(SOAK_SECONDS + 60)
@pytest.mark.parametrize("kinds", [LONG_CALLS, NEIGHBOURS], ids=lambda kinds: kinds[0])
def test_soak_of_chosen_fault_kinds_injects_each(tmp_path: Path, kinds: tuple[str, ...]) -> None:
    words = ("--minutes", "0.1", "--each", "--seed", "3", "--slow-seconds", "30", *PATIENCE)
    summary = soaked(tmp_path, *words, kinds=kinds)
    assert {kind for kind, metrics in summary["faults"].items() if metrics["injected"]} == set(
        kinds
    )


def test_slow_seconds_below_a_pause_are_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        soak.main(["--slow-seconds", "12"])
    assert "--slow-seconds must be >= 30, got 12" in capsys.readouterr().err


def test_soak_injects_each_fault_kind_even_after_its_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    injected: list[str] = []
    monkeypatch.setattr(soak.Soak, "_inject", lambda self, run, kind, random: injected.append(kind))
    run = cast("FaultRun", SimpleNamespace(link=None, follow_for=lambda seconds: None))
    one = soak.Soak(tmp_path, seed=1, minutes=0.0, meets_each=True)
    one._break(run, Random(1))
    assert sorted(injected) == [
        kind
        for kind, fault in sorted(soak.FAULTS.items())
        if not (fault.needs_link or fault.ends_run)
    ]
    injected.clear()
    soak.Soak(tmp_path, seed=1, minutes=0.0)._break(run, Random(1))
    assert injected == []


def test_worker_dies_as_often_as_configured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    order = tmp_path / soak_plugins.deaths_of("trainer-0")
    order.write_text("xx")
    for num_left in (1, 0):
        with pytest.raises(RuntimeError, match=soak_plugins.ERROR):
            soak_plugins.die_if_commanded("trainer-0")
        assert (len(order.read_text()) if order.exists() else 0) == num_left
    soak_plugins.die_if_commanded("trainer-0")
    order.write_text(soak_plugins.ALWAYS)
    for _ in range(9):
        with pytest.raises(RuntimeError, match=soak_plugins.ERROR):
            soak_plugins.die_if_commanded("trainer-0")


def test_soak_violation_exits_with_6_and_keeps_all_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(self: soak.Soak) -> None:
        self.injected += [
            soak.Injected("poison", "3 records", seconds) for seconds in (2.0, 4.0, None)
        ]
        self.violations.append("soak-0-0: sample trained twice: 1")

    monkeypatch.setattr(soak.Soak, "run", run)
    monkeypatch.setattr(soak.signal, "signal", lambda *_: None)
    assert soak.main(["--folder", str(tmp_path), "--summary", str(tmp_path / "summary.json")]) == 6
    metrics = orjson.loads((tmp_path / "summary.json").read_bytes())["faults"]["poison"]
    assert {
        name: metrics[name] for name in ("injected", "recovered", "seconds_p50", "seconds_max")
    } == {
        "injected": 3,
        "recovered": 2,
        "seconds_p50": 3.0,
        "seconds_max": 4.0,
    }
    printed = capsys.readouterr().out
    assert "VIOLATED  soak-0-0: sample trained twice: 1" in printed
    assert f"are kept in {tmp_path}" in printed


def test_settings_sampled_by_a_soak_are_valid_run_settings(tmp_path: Path) -> None:
    random = Random(1)
    sampled = [
        soak.Soak(tmp_path, seed=1, minutes=1.0)._settings(number, random, None)
        for number in range(60)
    ]
    kinds = {
        (config.broker.prompt_queue, config.workers.rollout, config.run.mode) for config in sampled
    }
    assert len(kinds) == 8, "each lease with one and two rollout workers, async and sync"
