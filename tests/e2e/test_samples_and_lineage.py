"""The history of a finished run through the command line: its samples, and the lineage from weights
to data and back.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import orjson
import pyarrow.parquet
import pytest
from command_line import PROMPTS, FinishedRun, Relax

pytestmark = pytest.mark.timeout(300)
NUM_SAMPLES = 3 * 4 * 4


def test_samples_are_shown_and_exported(
    relax: Relax, finished_run: FinishedRun, tmp_path: Path
) -> None:
    listed = relax(
        "samples",
        finished_run.run_file,
        "--from",
        "beginning",
        "--no-follow",
        "--output",
        "json",
    )
    lines = [orjson.loads(line) for line in listed.out.splitlines()]
    assert (listed.code, listed.err) == (0, "")
    assert len({line["sample_id"] for line in lines if line["outcome"] == "trained"}) == NUM_SAMPLES
    assert [line["rolled_out_at"] for line in lines] == sorted(
        line["rolled_out_at"] for line in lines
    )

    best = max(lines, key=lambda line: line["reward"])
    shown = relax("samples", finished_run.run_file, "--sample", best["sample_id"], "--tokens")
    assert shown.code == 0, shown.err
    assert any(f"user:\n    {prompt}\n" in shown.out for prompt in PROMPTS)
    assert f"{'reward':<26}{best['reward']:g} by {finished_run.config.reward.function}" in shown.out
    table = shown.out.partition("position  token")[2].splitlines()[1:]
    assert sum(" yes " in row for row in table) == best["num_completion_tokens"]

    path = tmp_path / "samples.parquet"
    exported = relax(
        "samples",
        finished_run.run_file,
        "--out",
        path,
        "--tokens",
        "--version",
        "..1",
    )
    assert exported.code == 0, exported.err
    rows = pyarrow.parquet.read_table(path).to_pylist()
    assert {row["sample_id"] for row in rows} == {
        line["sample_id"] for line in lines if line["policy_version"] <= 1
    }
    rewards = {line["sample_id"]: line["reward"] for line in lines}
    assert all(
        row["reward"] == rewards[row["sample_id"]]
        and len(row["tokens"]) == len(row["rollout_logprobs"])
        for row in rows
    )


def test_samples_tail_exits_cleanly_when_interrupted(finished_run: FinishedRun) -> None:
    command = [
        sys.executable,
        "-m",
        "relax_events.cli",
        "samples",
        str(finished_run.run_file),
        "--last",
        "2",
        "--output",
        "json",
    ]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    ) as tail:
        assert tail.stdout is not None
        first = [orjson.loads(tail.stdout.readline()) for _ in range(2)]
        tail.send_signal(signal.SIGINT)
        rest, errors = tail.communicate(timeout=100)
    assert (tail.returncode, rest, errors) == (0, "", "")
    assert first[0]["rolled_out_at"] <= first[1]["rolled_out_at"]


def test_lineage_links_policy_versions_to_data_rows_and_back(
    relax: Relax, finished_run: FinishedRun
) -> None:
    version = relax("lineage", "version:2", finished_run.run_file, "--output", "json")
    assert version.code == 0, version.err
    made = orjson.loads(version.out)
    assert (made["train_step"], len(made["prompt_group_ids"]), len(made["samples"])) == (1, 4, 16)
    assert [use["reward_name"] for use in made["rewards"]] == [finished_run.config.reward.function]

    sample = made["samples"][0]
    way = relax("lineage", sample["sample_id"], finished_run.run_file)
    assert way.code == 0, way.err
    assert f"data_row {sample['data_row']}, row {sample['row']}" in way.out
    assert sample["position"] in way.out
    assert "in version 2 and every later one" in way.out

    row = relax("lineage", f"row:{sample['data_row']}", finished_run.run_file, "--output", "json")
    uses = {use["prompt_group_id"]: use for use in orjson.loads(row.out)}
    assert uses[sample["prompt_group_id"]]["train_step"] == 1
    assert {use["prompt"] for use in uses.values()} == {PROMPTS[sample["data_row"]]}


def test_dead_letter_command_reports_a_run_without_dead_letters(
    relax: Relax, finished_run: FinishedRun
) -> None:
    listed = relax("deadletter", finished_run.run_file)
    assert (listed.code, listed.out.splitlines()[-1]) == (0, "no dead letters")
