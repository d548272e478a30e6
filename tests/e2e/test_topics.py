"""`relax topics` on a finished run, as a shell calls it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import orjson
import pytest
from command_line import Finished, FinishedRun, call_relax

pytestmark = pytest.mark.timeout(300)


def topics(run: FinishedRun, verb: str, *arguments: str | Path) -> Finished:
    """Call `relax topics VERB` with the run's file and JSON output."""
    return call_relax(
        "topics", verb, *arguments, "--output", "json", cwd=run.run_file.parent, timeout_seconds=200
    )


def test_topics_commands_describe_a_finished_run(finished_run: FinishedRun) -> None:
    run_file, prefix = finished_run.run_file, f"relax.{finished_run.config.run.id}."
    planned = topics(finished_run, "apply", run_file, "--dry-run")
    assert planned.code == 0, planned.err
    described = {
        row["topic"].removeprefix(prefix): row
        for row in orjson.loads(topics(finished_run, "show", run_file).out)
    }
    # 3 steps of 4 prompt groups, whose samples share a record.
    assert [
        described[entity]["records"]
        for entity in ("prompt.groups", "rollout.samples", "advantage.samples")
    ] == [12, 12, 12]
    lag = orjson.loads(topics(finished_run, "show", run_file, "--by", "slot").out)
    roles = ("reward", "advantage", "trainer", "rollout")
    assert {row["role"]: row["lag"] for row in lag} == dict.fromkeys(roles, 0)
    queue = {None: None}
    assert {row["slot"]: row["policy_version"] for row in lag} == {0: 3, 1: 1, 2: 2} | queue
    checked = topics(finished_run, "show", run_file, "--check")
    assert checked.code == 0, checked.out


def test_changes_are_shown_and_not_made_in_a_dry_run(finished_run: FinishedRun) -> None:
    run_file = finished_run.run_file
    reset = topics(
        finished_run, "reset", run_file, "--role", "reward", "--to-version", "1", "--dry-run"
    )
    assert reset.code == 0, reset.err
    # The last step's samples were generated on version 1 at the earliest; those of the step before
    # may have been.
    assert 4 <= sum(row["read_again"] for row in orjson.loads(reset.out)) <= 8
    purge = topics(finished_run, "purge", run_file, "--before-version", "1", "--dry-run")
    assert purge.code == 0, purge.err
    refused = topics(finished_run, "purge", run_file, "--yes")
    assert (refused.code, "the run file sets no run.retain_versions" in refused.err) == (2, True)
    begins = {
        row["topic"]: row["purged"]
        for row in orjson.loads(topics(finished_run, "show", run_file).out)
    }
    assert set(begins.values()) == {0}


def test_tail_shows_records_with_headers(finished_run: FinishedRun) -> None:
    shown = topics(
        finished_run,
        "tail",
        "control.train-steps",
        finished_run.run_file,
        "--from",
        "beginning",
        "--no-follow",
        "--headers",
    )
    lines = [orjson.loads(line) for line in shown.out.splitlines()]
    found = [(line["event"], line["fields"]["train_step"], line["headers"]) for line in lines]
    assert found == [("TrainStepCommitted", step, {}) for step in range(3)]


@pytest.mark.parametrize(
    ("arguments", "first"),
    [
        (["tail", "prompt.groups", "RUN_FILE", "--from", "beginning"], b"PromptGroupIssued"),
        (["show", "RUN_FILE", "--by", "slot", "--watch", "--output", "json"], b"["),
    ],
    ids=["tail", "lag"],
)
def test_following_command_exits_with_0_at_control_c(
    finished_run: FinishedRun, arguments: list[str], first: bytes
) -> None:
    words = [str(finished_run.run_file) if word == "RUN_FILE" else word for word in arguments]
    command = [sys.executable, "-m", "relax_events.cli", "topics", *words]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"}
    ) as process:
        assert process.stdout is not None
        assert first in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=100)
    assert process.returncode == 0


def move(finished_run: FinishedRun, tmp_path: Path, run_id: str) -> None:
    """Export the run with its objects, and import it under another id, into another folder's
    store."""
    exported = topics(
        finished_run, "export", finished_run.run_file, tmp_path / "exported", "--objects"
    )
    assert exported.code == 0, exported.err
    assert (
        sum(
            row["records"]
            for row in orjson.loads(exported.out)
            if row["topic"] == "rollout.samples"
        )
        == 12
    )
    moved = (f"run.directory={tmp_path / '.relax'}", "--run-id", run_id)
    imported = topics(
        finished_run,
        "import",
        tmp_path / "exported",
        finished_run.run_file,
        *moved,
        "--yes",
        "--verify",
    )
    assert imported.code == 0, imported.err
    assert "every partition is as exported" in imported.err


def test_run_moved_with_its_objects_keeps_its_ledger(
    finished_run: FinishedRun, tmp_path: Path, run_id: str
) -> None:
    move(finished_run, tmp_path, run_id)
    ledgers = [
        call_relax(
            "ledger", "check", finished_run.run_file, *overrides, "--output", "json", cwd=tmp_path
        )
        for overrides in ([], [f"run.id={run_id}", f"run.directory={tmp_path / '.relax'}"])
    ]
    assert [ledger.code for ledger in ledgers] == [0, 0]
    assert ledgers[0].out == ledgers[1].out


@pytest.mark.long
def test_replay_of_an_imported_run_reproduces_its_training_bit_for_bit(
    finished_run: FinishedRun, tmp_path: Path, run_id: str
) -> None:
    move(finished_run, tmp_path, run_id)
    cluster = (
        "--bootstrap-servers",
        finished_run.config.broker.bootstrap_servers,
        "--directory",
        tmp_path / ".relax",
    )
    replayed = call_relax(
        "runs",
        "replay",
        run_id,
        f"{run_id}-again",
        *cluster,
        "--verify",
        "--trust-source",
        cwd=tmp_path,
        timeout_seconds=200,
    )
    assert replayed.code == 0, replayed.err
    assert f"3 steps are those of {run_id}, bit for bit" in replayed.out + replayed.err
