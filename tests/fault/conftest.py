"""Whole runs to be broken: one broker and one small random model for the session, a run of its own for every test."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from harness import FaultRun, command, environment

from relax_events.broker.embedded import EmbeddedBroker
from relax_events.config import RunConfig

TEST_SECONDS = 240
PROMPTS = [f"spell {word} backwards" for word in ("tea", "milk", "juice", "water", "coffee", "lemon", "cocoa", "cider")]
# Spread over many values, so that nearly every prompt group of a random model has something to learn from, and the same wherever it is computed.
# Slowly, for tests that need time within a run on a machine of any speed.
REWARDS = """
import time
import zlib

def spread(completion, *, answer, metadata, prompt):
    return zlib.crc32(completion.encode()) % 1000 / 1000

def slowly(completion, *, answer, metadata, prompt):
    time.sleep(0.01)
    return spread(completion, answer=answer, metadata=metadata, prompt=prompt)
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give whole runs the time they need."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(TEST_SECONDS))


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of all runs of the session, with prompts and a reward file in it."""
    folder = tmp_path_factory.mktemp("fault")
    (folder / "prompts.jsonl").write_bytes(b"".join(orjson.dumps({"prompt": prompt, "answer": ""}) + b"\n" for prompt in PROMPTS))
    (folder / "reward.py").write_text(REWARDS)
    return folder


@pytest.fixture(scope="session")
def broker(directory: Path) -> Iterator[EmbeddedBroker]:
    """Give the session's broker; a test may kill it, since `relax run` starts it again."""
    with EmbeddedBroker(directory / "broker") as started:
        yield started


@pytest.fixture(scope="session")
def model(directory: Path) -> Path:
    """Return a random model, as `relax models prepare` makes it."""
    tree = {
        "run": {"id": "prepare", "directory": str(directory)},
        "model": {"path": str(directory / "model"), "tiny": {"hidden_size": 32, "num_layers": 1, "corpus_rows": len(PROMPTS)}},
        "data": {"source": f"jsonl:{directory / 'prompts.jsonl'}"},
    }
    run_file = directory / "prepare.json"
    run_file.write_bytes(orjson.dumps(tree))
    subprocess.run(command("models", "prepare", run_file), cwd=directory, env=environment(), timeout=100, check=True, capture_output=True)
    return directory / "model"


@pytest.fixture
def start_run(directory: Path, broker: EmbeddedBroker, model: Path, run_id: str) -> Iterator[Callable[..., FaultRun]]:
    """Return a maker of runs with every role in them: `start_run(run={"num_steps": 8})` lays sections over the usual ones."""
    opened: list[FaultRun] = []

    def start(**sections: dict[str, Any]) -> FaultRun:
        tree: dict[str, dict[str, Any]] = {
            "run": {"id": f"{run_id}-{len(opened)}", "directory": str(directory), "groups_per_step": 8, "samples_per_prompt": 4, "max_staleness": 2},
            "model": {"path": str(model)},
            "data": {"source": f"jsonl:{directory / 'prompts.jsonl'}"},
            "broker": {"session_timeout_seconds": 3.0, "request_timeout_seconds": 10.0},
            "engine": {"max_context_tokens": 96, "max_running_samples": 64, "max_prompt_groups": 16, "sampling": {"max_new_tokens": 6}},
            "reward": {"function": f"{directory / 'reward.py'}:slowly"},
            "algorithm": {"kl_coefficient": 0.001, "old_logprobs": "actor"},
            "trainer": {"checkpoint_every": 5},
            "workers": {"beat_seconds": 0.2},
        }
        for name, keys in sections.items():
            tree[name] = tree.get(name, {}) | keys
        broker.start()
        opened.append(FaultRun(RunConfig.model_validate(tree), broker))
        return opened[-1]

    yield start
    for run in opened:
        run.__exit__(None, None, None)
