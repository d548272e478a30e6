"""Runs with a parent: replays bit for bit and with other settings, a fork, and a second learner
next to a live run.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import orjson
import pytest
from command_line import SPREAD_REWARD, FinishedRun, Relax, snapshot_of

from relax_events.history.runs.listing import read_runs
from relax_events.kafka.connection import Connection

pytestmark = pytest.mark.timeout(300)
PATIENCE_SECONDS = 120.0


TRUST = "--trust-source"
"""The runs are made in a folder of their own, where no run file says what the source's log does."""


def location_options(source: FinishedRun, folder: Path) -> tuple[str, ...]:
    """Return options that name the finished run's broker, and the test's folder for new runs."""
    return (
        "--bootstrap-servers",
        source.config.broker.bootstrap_servers,
        "--directory",
        str(folder / ".relax"),
    )


def report_of(folder: Path, run_id: str) -> dict[str, Any]:
    """Read a run's report."""
    report: dict[str, Any] = orjson.loads(
        (folder / ".relax/runs" / run_id / "report.json").read_bytes()
    )
    assert report["succeeded"]
    assert report["ledger_problems"] == []
    return report


def test_replay_matches_its_source_bit_for_bit(
    relax: Relax, finished_run: FinishedRun, run_id: str, tmp_path: Path
) -> None:
    source = finished_run.config.run.id
    ended = relax(
        "runs",
        "replay",
        source,
        run_id,
        "--verify",
        TRUST,
        *location_options(finished_run, tmp_path),
        timeout_seconds=200,
    )
    assert ended.code == 0, ended.err
    assert f"3 steps are those of {source}, bit for bit" in ended.out
    recorded = orjson.loads((finished_run.config.run_directory / "report.json").read_bytes())
    report = report_of(tmp_path, run_id)
    assert report["weights_digests"] == recorded["weights_digests"]
    assert report["outcomes"] | {"issued": 12, "trained": 12, "in_flight": 0} == report["outcomes"]
    checked = relax("ledger", "check", tmp_path / ".relax/runs" / run_id / "run-file.json")
    assert (checked.code, checked.out.splitlines()[-1]) == (0, "all promises hold"), checked.err
    shown = orjson.loads(
        relax(
            "runs", "show", source, "--output", "json", *location_options(finished_run, tmp_path)
        ).out
    )
    assert f"{run_id} (replay from 0)" in shown["run"]["forks"]
    assert shown["versions"]["recorded"] == [0, 3]
    assert [step["loss"] for step in shown["steps"]] == recorded["curves"]["loss"]


@pytest.mark.long
def test_replay_with_several_optimizer_steps_matches_its_source_bit_for_bit(
    relax: Relax, run_file: Path, run_id: str, bootstrap_servers: str, tmp_path: Path
) -> None:
    where = f"broker.bootstrap_servers={bootstrap_servers}"
    ended = relax("run", run_file, where, "trainer.num_epochs=2", "trainer.num_mini_batches=2")
    assert ended.code == 0, ended.err
    directory = tmp_path / ".relax"
    again = relax(
        "runs",
        "replay",
        run_id,
        f"{run_id}-r",
        "--verify",
        "--bootstrap-servers",
        bootstrap_servers,
        "--directory",
        directory,
    )
    assert again.code == 0, again.err
    assert f"steps are those of {run_id}, bit for bit" in again.out
    once = relax("run", run_file, where, f"run.id={run_id}-once")
    assert once.code == 0, once.err
    first, replayed, other = (
        report_of(tmp_path, name)["weights_digests"]
        for name in (run_id, f"{run_id}-r", f"{run_id}-once")
    )
    assert first == replayed
    assert not set(first) & set(other), "the passes are no others than one"


def test_replay_from_version_one_with_gspo_differs_from_its_source(
    relax: Relax, finished_run: FinishedRun, run_id: str, tmp_path: Path
) -> None:
    source = finished_run.config.run.id
    where = (TRUST, *location_options(finished_run, tmp_path))
    ended = relax(
        "runs",
        "replay",
        source,
        run_id,
        "algorithm.name=gspo",
        "--from-version",
        "1",
        *where,
        timeout_seconds=200,
    )
    assert ended.code == 0, ended.err
    report = report_of(tmp_path, run_id)
    recorded = orjson.loads((finished_run.config.run_directory / "report.json").read_bytes())
    assert report["curves"]["train_step"] == [1, 2]
    assert not set(report["weights_digests"]) & set(recorded["weights_digests"])
    assert report["curves"]["reward_mean"] == recorded["curves"]["reward_mean"][1:]
    assert report["source"]["curves"]["loss"] == recorded["curves"]["loss"][1:]
    shown = snapshot_of(tmp_path / ".relax/runs" / run_id)["source"]["overview"]
    assert shown["columns"]["loss"] == recorded["curves"]["loss"][1:]
    refused = relax(
        "runs", "replay", source, f"{run_id}-v", "--from-version", "1", "--verify", *where
    )
    assert (refused.code, "begins at version 0 or at a checkpoint" in refused.err) == (2, True), (
        refused.err
    )


def test_replay_learns_from_the_scores_of_a_rescoring(
    relax: Relax, finished_run: FinishedRun, run_id: str, tmp_path: Path
) -> None:
    """The other reward is one minus the recorded one, so each step's mean is one minus its mean."""
    source, scores = finished_run.config.run.id, f"inverse-{run_id}"
    (tmp_path / "inverse.py").write_text(
        SPREAD_REWARD
        + "\ndef inverse(completion, **given):\n    return 1 - spread(completion, **given)\n"
    )
    rescored = relax(
        "rewards",
        "inverse.py:inverse",
        "--run",
        finished_run.run_file,
        "--keep",
        scores,
        "--output",
        "json",
    )
    assert rescored.code == 0, rescored.err
    assert orjson.loads(rescored.out)["pearson"] == pytest.approx(-1, abs=1e-5)
    ended = relax(
        "runs",
        "replay",
        source,
        run_id,
        "--scores",
        scores,
        TRUST,
        *location_options(finished_run, tmp_path),
        timeout_seconds=200,
    )
    assert ended.code == 0, ended.err
    recorded = orjson.loads((finished_run.config.run_directory / "report.json").read_bytes())
    report = report_of(tmp_path, run_id)
    assert report["curves"]["reward_mean"] == pytest.approx(
        [1 - mean for mean in recorded["curves"]["reward_mean"]], abs=1e-5
    )
    assert not set(report["weights_digests"]) & set(recorded["weights_digests"])


def test_untrusted_source_run_is_rejected_with_a_list_of_its_code_and_paths(
    relax: Relax, finished_run: FinishedRun, run_id: str, tmp_path: Path
) -> None:
    source = finished_run.config.run.id
    refused = relax("runs", "fork", source, run_id, *location_options(finished_run, tmp_path))
    assert refused.code == 2
    assert (
        f'reward.function = "{finished_run.config.reward.function}"  (code that would be run)'
        in refused.err
    )
    assert (
        f'model.path = "{finished_run.config.model.path}"  (a file or folder that would be used)'
        in refused.err
    )
    assert "give --trust-source to inherit them as they are" in refused.err
    refused = relax("runs", "replay", source, run_id, *location_options(finished_run, tmp_path))
    assert (refused.code, "reward.function" in refused.err, "model.path" in refused.err) == (
        2,
        False,
        True,
    ), refused.err
    assert not (tmp_path / ".relax/runs").exists()


def test_second_learner_replays_a_fork_while_the_fork_is_running(
    relax: Relax, finished_run: FinishedRun, run_id: str, tmp_path: Path
) -> None:
    where = (*location_options(finished_run, tmp_path), TRUST)
    live, second = f"{run_id}-live", f"{run_id}-second"
    fork = [
        "runs",
        "fork",
        finished_run.config.run.id,
        live,
        "--at-version",
        "2",
        "run.num_steps=5",
        *where,
    ]
    with (tmp_path / "fork.log").open("wb") as output:
        leader = subprocess.Popen(
            [sys.executable, "-m", "relax_events.cli", *fork],
            cwd=tmp_path,
            stdout=output,
            stderr=output,
        )
    try:
        until_described(
            Connection(finished_run.config.broker.bootstrap_servers, client_id="test"), live, leader
        )
        ended = relax(
            "runs",
            "replay",
            live,
            second,
            "--follow",
            "trainer.learning_rate=2e-3",
            *where,
            timeout_seconds=200,
        )
        assert ended.code == 0, ended.err
        assert leader.wait(PATIENCE_SECONDS) == 0, (tmp_path / "fork.log").read_text()
    finally:
        leader.kill()
        leader.wait(10)
    led, followed = report_of(tmp_path, live), report_of(tmp_path, second)
    assert led["curves"]["train_step"] == followed["curves"]["train_step"] == [2, 3, 4]
    assert led["curves"]["reward_mean"] == followed["curves"]["reward_mean"]
    assert not set(led["weights_digests"]) & set(followed["weights_digests"])
    rows = [
        orjson.loads(line)
        for line in (tmp_path / ".relax/runs" / second / "logs/trainer-0.log")
        .read_text()
        .splitlines()
        if line[0] == "{"
    ]
    assert [row["kind"] for row in rows if row["event"] == "parent.loaded"] == ["checkpoint"]


def until_described(connection: Connection, run_id: str, process: subprocess.Popen[bytes]) -> None:
    """Wait until a run's log has its description."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (run := read_runs(connection, [run_id]).get(run_id)) is None or run.description is None:
        assert time.monotonic() < deadline, (
            f"run {run_id} was not described within {PATIENCE_SECONDS:g} s"
        )
        assert process.poll() is None, f"run {run_id} ended first"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ("replay", "no-such-run"),
            r"parent.run = 'no-such-run' is not a run on .*see relax runs show",
        ),
        (
            ("replay", "SOURCE", "--until-version", "9"),
            r"has come to version 3, so versions 0 to 9 can't be replayed; choose",
        ),
        (
            ("replay", "SOURCE", "run.max_staleness=4"),
            r"run.max_staleness says how the rollouts were made: run .* has 1, got 4",
        ),
        (
            ("replay", "SOURCE", "--verify", "trainer.learning_rate=0.5"),
            r"--verify compares bit for bit, so \[trainer\] must be as in run",
        ),
        (
            ("replay", "SOURCE", "parent.from_version=1"),
            r"override 'parent.from_version=1': which run goes back to which is said by",
        ),
        (
            ("fork", "SOURCE"),
            r"a fork counts on from version 3, so run.num_steps must be above it, got 3",
        ),
    ],
)
def test_replay_that_is_impossible_is_rejected(
    arguments: tuple[str, ...],
    text: str,
    relax: Relax,
    finished_run: FinishedRun,
    run_id: str,
    tmp_path: Path,
) -> None:
    verb, source, *rest = (
        finished_run.config.run.id if word == "SOURCE" else word for word in arguments
    )
    ended = relax(
        "runs", verb, source, run_id, *rest, TRUST, *location_options(finished_run, tmp_path)
    )
    assert ended.code == 2, ended.err
    assert re.search(text, ended.err), ended.err
