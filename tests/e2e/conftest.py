"""Whole runs through the command line: a run file of the test's own, the session's broker, and one small random model for all."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import Finished, Relax, call_relax, write_rows

PROMPTS = [f"spell {word} backwards" for word in ("tea", "milk", "juice", "water", "coffee", "lemon", "cocoa", "cider")]
# Spread over many values, so that nearly every prompt group of a random model has something to learn from, and the same wherever it is computed.
SPREAD_REWARD = """
import zlib

def spread(completion, *, answer, metadata, prompt):
    return zlib.crc32(completion.encode()) % 1000 / 1000
"""


@pytest.fixture
def relax(tmp_path: Path) -> Relax:
    """Return a caller of `relax` in the test's folder."""

    def call(*arguments: str | Path, timeout_seconds: float = 60.0) -> Finished:
        return call_relax(*arguments, cwd=tmp_path, timeout_seconds=timeout_seconds)

    return call


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with prompts, a reward file and a random model, as `relax models prepare` makes it."""
    folder = tmp_path_factory.mktemp("prepared")
    write_rows(folder / "prompts.jsonl", [{"prompt": prompt, "answer": prompt.split()[1][::-1]} for prompt in PROMPTS])
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
    made = call_relax("models", "prepare", run_file, cwd=folder, timeout_seconds=100)
    assert made.code == 0, made.err
    return folder


@pytest.fixture
def run_file(tmp_path: Path, prepared: Path, run_id: str) -> Path:
    """Write a run file that trains the prepared model for a few small steps; the broker's address is up to the test."""
    path = tmp_path / "run.toml"
    path.write_text(f"""
[run]
id = "{run_id}"
num_steps = 3
groups_per_step = 4
samples_per_prompt = 4

[model]
path = "{prepared / "model"}"

[data]
source = "jsonl:{prepared / "prompts.jsonl"}"

[engine]
max_context_tokens = 96
max_running_samples = 16
sampling = {{ max_new_tokens = 6 }}

[reward]
function = "{prepared / "reward.py"}:spread"

[workers]
beat_seconds = 0.2
""")
    return path
