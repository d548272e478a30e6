"""A run on a taskset of verifiers: a harness in that library's own Python drives its sessions."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import FinishedRun, Relax, report_of, sample_events

from relax_events.config import load_run_config
from relax_events.events.types import SampleRolledOut
from relax_events.models.tokenizer_folder import FolderTokenizer

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-agents" / "bin" / "python"
NUM_STEPS, SAMPLES_PER_STEP = 3, 8
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON.exists(), reason="needs the environment of `make agents`"),
]


@contextmanager
def running_harness(folder: Path, port: int) -> Iterator[Path]:
    """Have the harness for as long as the block takes, and yield the file of its traces; it ends by
    itself on SIGTERM.
    """
    agents, traces = folder / "configs" / "agents", folder / "traces.jsonl"
    words = ["--gateway", f"http://127.0.0.1:{port}", "--token-file", folder / "token"]
    more = ["--traces", traces, "--patience-seconds", "600"]
    with (folder / "harness.log").open("wb") as file:
        process = subprocess.Popen(
            [
                *(PYTHON, agents / "verifiers_harness.py", "serve", "guess_sum"),
                *(*words, *more),
            ],
            stderr=file,
        )
    try:
        yield traces
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, (folder / "harness.log").read_text()
    finally:
        process.kill()
        process.wait()
        print((folder / "harness.log").read_text()[-2000:])  # shown with a failure


def sampled_turns(sample: SampleRolledOut, tokenizer: FolderTokenizer) -> list[str]:
    """Return the texts of the runs of tokens that are trained."""
    mask = np.concatenate(([0], np.asarray(sample.loss_mask, np.int8), [0]))
    starts, ends = np.flatnonzero(np.diff(mask) == 1), np.flatnonzero(np.diff(mask) == -1)
    tokens = np.asarray(sample.tokens)
    return [
        tokenizer.decode(tokens[start:end].tolist(), skip_special_tokens=True)
        for start, end in zip(starts, ends, strict=True)
    ]


def test_a_taskset_of_verifiers_trains_token_by_token_with_its_own_reward(
    relax: Relax, tmp_path: Path, bootstrap_servers: str, run_id: str
) -> None:
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    (tmp_path / "token").write_text("a-token")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    run_file = tmp_path / "configs" / "verifiers.toml"
    text = run_file.read_text().replace('"verifiers"', f'"{run_id}"', 1)
    run_file.write_text(f'{text}\n[broker]\nbootstrap_servers = "{bootstrap_servers}"\n')
    with running_harness(tmp_path, port) as traces:
        ended = relax(
            "run",
            run_file,
            f"environment.harness.port={port}",
            f"environment.harness.token_file={tmp_path / 'token'}",
            *("run.mode=sync", "run.max_staleness=0", f"run.num_steps={NUM_STEPS}"),
            *("run.prompts_per_step=2", "run.samples_per_prompt=4", "sft_warmup.steps=40"),
            "algorithm.old_logprobs=rollout",
            timeout_seconds=600,
        )
        assert ended.code == 0, ended.err
    report = report_of(tmp_path, run_id)
    assert (report["samples_lost"], report["samples_trained_twice"], report["ledger_problems"]) == (
        0,
        0,
        [],
    )
    assert report["samples_trained"] == NUM_STEPS * SAMPLES_PER_STEP
    assert max(report["curves"]["mismatch_max_abs"]) < 1e-4
    run = FinishedRun(
        run_file, load_run_config(tmp_path / f".relax/runs/{run_id}/run.json", environment={})
    )
    check_samples(run, tmp_path, played(traces), report)


def played(traces: Path) -> dict[str, dict[str, Any]]:
    """Return the last episode of each sample, as verifiers has recorded it."""
    return {line["sample_id"]: line for line in map(json.loads, traces.read_text().splitlines())}


def check_samples(
    run: FinishedRun, folder: Path, episodes: dict[str, dict[str, Any]], report: dict[str, Any]
) -> None:
    """Compare each sample with verifiers' trace of it: the policy's turns, the reward, and with the
    report of the trainer the number of tokens.
    """
    tokenizer = FolderTokenizer.open(folder / run.config.model.path)
    samples = [
        event
        for event in sample_events(run, "rollout.samples")
        if isinstance(event, SampleRolledOut)
    ]
    assert len(samples) == NUM_STEPS * SAMPLES_PER_STEP
    for sample in samples:
        episode = episodes[sample.sample_id]
        said = [
            node["message"]["content"]
            for node in episode["trace"]["nodes"]
            if node["message"]["role"] == "assistant"
        ]
        assert sampled_turns(sample, tokenizer) == said
        assert 1 <= len(said) <= 2
        scores = episode["trace"]["rewards"].values()
        reward = sum(one["score"] * one["weight"] for one in scores)
        np.testing.assert_allclose(sample.environment_rewards, [reward], rtol=1e-6)
        assert episode["finish"] == {"reward": pytest.approx(reward)}
    by_step = [[one for one in samples if one.key.train_step == step] for step in range(NUM_STEPS)]
    sampled = [sum(int(np.sum(one.loss_mask)) for one in step) for step in by_step]
    assert report["curves"]["num_loss_tokens"] == sampled
