"""Whole runs through the command line: a run file for each test, the session's broker, and one
small random model for all.
"""

from __future__ import annotations

import shutil
import threading
import uuid
from pathlib import Path

import pytest
from command_line import (
    PROMPTS,
    SPREAD_REWARD,
    Finished,
    FinishedRun,
    Relax,
    call_relax,
    run_file_text,
    write_rows,
)

from relax_events.config import load_run_config
from tests.stack.webhook_sink import WebhookSink


@pytest.fixture
def relax(tmp_path: Path) -> Relax:
    """Return a caller of `relax` in the test's folder."""

    def call(*arguments: str | Path, timeout_seconds: float = 200.0) -> Finished:
        return call_relax(*arguments, cwd=tmp_path, timeout_seconds=timeout_seconds)

    return call


@pytest.fixture
def replay_options(bootstrap_servers: str, tmp_path: Path) -> tuple[str, ...]:
    """Return options of a replay or fork that is made in the test's folder, of a run that was made
    elsewhere."""
    directory = str(tmp_path / ".relax")
    servers = ("--bootstrap-servers", bootstrap_servers)
    return (*servers, "--directory", directory, "--trust-source")


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with prompts, a reward file and a random model, as `relax models prepare`
    makes it."""
    folder = tmp_path_factory.mktemp("prepared")
    write_rows(
        folder / "prompts.jsonl",
        [{"prompt": prompt, "answer": prompt.split()[1][::-1]} for prompt in PROMPTS],
    )
    (folder / "reward.py").write_text(SPREAD_REWARD)
    run_file = folder / "prepare.toml"
    run_file.write_text(f"""
[run]
id = "prepare"
[model]
path = "{folder / "model"}"
tiny = {{ hidden_size = 32, num_layers = 1, corpus_rows = 8 }}
[data]
source = "jsonl:{folder / "prompts.jsonl"}"
""")
    made = call_relax("models", "prepare", run_file, cwd=folder, timeout_seconds=200)
    assert made.code == 0, made.err
    return folder


@pytest.fixture(scope="session")
def teacher(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model of the policy's architecture and tokenizer that likes other tokens much better
    than the random policy does."""
    import safetensors.torch
    import torch

    folder = shutil.copytree(prepared / "model", tmp_path_factory.mktemp("teacher") / "model")
    generator = torch.Generator().manual_seed(5)
    for path in folder.glob("*.safetensors"):
        tensors = safetensors.torch.load_file(path)
        moved = {
            name: value + 0.25 * torch.randn(value.shape, generator=generator)
            for name, value in tensors.items()
        }
        safetensors.torch.save_file(moved, path, metadata={"format": "pt"})
    return folder


@pytest.fixture
def run_file(tmp_path: Path, prepared: Path, run_id: str) -> Path:
    """Write a run file that trains the prepared model for a few small steps; the broker's address
    is up to the test."""
    path = tmp_path / "run.toml"
    path.write_text(run_file_text(prepared, run_id))
    return path


@pytest.fixture(scope="session")
def finished_run(
    prepared: Path, bootstrap_servers: str, tmp_path_factory: pytest.TempPathFactory
) -> FinishedRun:
    """Return a finished run of three steps, run once for all tests that read one. Tests must not
    change it.

    The first test that uses it waits for it, so all of them need `pytest.mark.timeout(300)`.
    """
    folder = tmp_path_factory.mktemp("finished")
    run_file, notification_urls = folder / "run.toml", folder / "notification_urls"
    more = f'directory = "{folder / ".relax"}"'
    text = run_file_text(prepared, f"t-{uuid.uuid4().hex[:12]}", more=more)
    telemetry = f'[telemetry]\nnotification_urls_file = "{notification_urls}"'
    run_file.write_text(
        f'{text}\n{telemetry}\n[broker]\nbootstrap_servers = "{bootstrap_servers}"\n'
    )
    with WebhookSink() as sink:
        threading.Thread(target=sink.serve_forever, daemon=True).start()
        notification_urls.write_text(f"json://127.0.0.1:{sink.server_port}/\n")
        ended = call_relax("run", run_file, cwd=folder, timeout_seconds=200)
        sink.shutdown()
    (folder / "notifications").write_text("\n".join(sink.list_titles()))
    assert ended.code == 0, ended.err
    return FinishedRun(run_file, load_run_config(run_file, environment={}))
