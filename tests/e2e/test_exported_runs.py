"""A run's model leaves the run: exported while it trains and after it ended, loaded by transformers
and served."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from command_line import Finished, Relax, report_of
from served_model import complete_tokens, served
from transformers import AutoModelForCausalLM, AutoTokenizer

from relax_events.runtime.failpoints import VARIABLE

pytestmark = pytest.mark.timeout(
    900
)  # four commands, each of which loads torch or a broker's client
START_SECONDS = 120.0
END_SECONDS = 200.0
NUM_TOKENS = 6


@contextmanager
def running(run_file: Path, *overrides: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start `relax run` in the run file's folder, and end it as Ctrl-C does."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("RELAX_")
    } | {"OMP_NUM_THREADS": "1", VARIABLE: ""}
    command = [sys.executable, "-m", "relax_events.cli", "run", str(run_file), *overrides]
    with (run_file.parent / "output.log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=run_file.parent, env=environment, stdout=log, stderr=log
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(END_SECONDS)
        finally:
            process.kill()
            process.wait()


def wait_for_version(process: subprocess.Popen[bytes], weights: Path, version: int) -> None:
    """Wait until the trainer has written a version that no later one has replaced yet."""
    deadline = time.monotonic() + START_SECONDS
    while not list(weights.glob(f"{version:08d}/manifest-*.json")):
        assert process.poll() is None, "the run ended early"
        assert time.monotonic() < deadline, f"no version {version} in {START_SECONDS} s"
        time.sleep(0.1)


def exported(ended: Finished) -> dict[str, Any]:
    """Read what an export says of itself."""
    assert ended.code == 0, ended.err
    tree: dict[str, Any] = orjson.loads(ended.out)
    return tree


def served_completion(folder: Path, prompt: list[int]) -> tuple[list[int], list[float]]:
    """Return greedy tokens and their log-probabilities from `relax serve`'s server."""
    with served(folder) as url:
        return complete_tokens(url, prompt, max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)


@torch.no_grad()
def own_logprobs(folder: Path, prompt: list[int], completion: list[int]) -> torch.Tensor:
    """Compute the log-probabilities of a completion by transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    logprobs = model(torch.tensor([prompt + completion])).logits[0].float().log_softmax(-1)
    return logprobs[len(prompt) - 1 : -1].gather(-1, torch.tensor(completion)[:, None])[:, 0]


def test_model_is_exported_during_the_run_and_after_it_and_served(
    relax: Relax, run_file: Path, bootstrap_servers: str, run_id: str, tmp_path: Path
) -> None:
    address = f"broker.bootstrap_servers={bootstrap_servers}"
    objects = tmp_path / ".relax/runs" / run_id / "objects"
    with running(run_file, address, "run.num_steps=2000") as process:
        wait_for_version(process, objects / "weights", 2)
        servers = ("--bootstrap-servers", bootstrap_servers)
        first = exported(
            relax("models", "export", run_id, "--to", "first", *servers, "--output", "json")
        )
        assert process.poll() is None
    assert first["policy_version"] >= 2
    assert first["source"] == "weights"

    words = shlex.split(report_of(tmp_path, run_id)["export_command"])
    second = exported(relax(*words[1:], "--output", "json", "--max-shard-size", "20KB"))
    assert second["policy_version"] >= first["policy_version"]
    assert second["num_files"] > 1
    assert second["weights_digest"] == report_of(tmp_path, run_id)["weights_digests"][-1]

    missing = relax("models", "export", run_id, "--to", "third", "--version", "99999", *servers)
    assert (
        missing.code,
        "has no version 99999; it has published versions 0 to" in missing.err,
    ) == (2, True)
    assert not (tmp_path / "third").exists()

    folder = tmp_path / second["folder"]
    assert f"{run_id}, version {second['policy_version']}" in (folder / "README.md").read_text()
    prompt = AutoTokenizer.from_pretrained(folder)("spell tea backwards").input_ids
    completion, logprobs = served_completion(folder, prompt)
    assert len(completion) == NUM_TOKENS
    assert torch.allclose(
        own_logprobs(folder, prompt, completion), torch.tensor(logprobs), atol=1e-5
    )
