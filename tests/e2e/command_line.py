"""Calls `relax` as a shell does, writes the run file of a small run, and reads a run's output."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from relax_events.config import RunConfig, load_run_config
from relax_events.events.codec import EventCodec
from relax_events.events.sample_columns import split_samples
from relax_events.events.types import Event
from relax_events.kafka.connection import Connection
from relax_events.kafka.log_reader import LogReader
from relax_events.runtime.failpoints import VARIABLE
from relax_events.topics import TopicPlan


@dataclass(frozen=True)
class Finished:
    """How a command ended."""

    code: int
    out: str
    err: str


@dataclass(frozen=True)
class FinishedRun:
    """A run that reached its goal; its run file names the broker and absolute paths, so that
    commands work from any folder."""

    run_file: Path
    config: RunConfig


Relax = Callable[..., Finished]
PROMPTS = [
    f"spell {word} backwards"
    for word in ("tea", "milk", "juice", "water", "coffee", "lemon", "cocoa", "cider")
]

# Spread over many values, so that nearly every prompt group of a random model has something to
# learn from, and the same wherever it is computed.
SPREAD_REWARD = """
import zlib

def spread(completion, *, answer, metadata, prompt):
    return zlib.crc32(completion.encode()) % 1000 / 1000
"""


def call_relax(
    *arguments: str | Path, cwd: Path, timeout_seconds: float = 200.0, failpoints: str = ""
) -> Finished:
    """Run `relax` in a folder, as a shell would; its workers die at the crash points that are
    armed."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("RELAX_")
    }
    environment |= {"OMP_NUM_THREADS": "1", VARIABLE: failpoints}
    command = [sys.executable, "-m", "relax_events.cli", *map(str, arguments)]
    ended = subprocess.run(
        command,
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
        check=False,
        umask=0o022,
    )
    return Finished(ended.returncode, ended.stdout, ended.stderr)


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write a JSON-lines file."""
    path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    return path


def report_of(folder: Path, run_id: str) -> dict[str, Any]:
    """Read the report of a run that was started in a folder."""
    report: dict[str, Any] = orjson.loads(
        (folder / ".relax/runs" / run_id / "report.json").read_bytes()
    )
    return report


def log_of(folder: Path, run_id: str, worker_id: str) -> list[dict[str, Any]]:
    """Read the log events of one of its workers."""
    lines = (folder / ".relax/runs" / run_id / "logs" / f"{worker_id}.log").read_text().splitlines()
    return [orjson.loads(line) for line in lines if line.startswith("{")]


def run_file_text(
    prepared: Path,
    run_id: str,
    *,
    more: str = "",
    learning_rate: float = 1e-3,
    num_steps: int = 3,
) -> str:
    """Return a run file of some steps of four prompt groups of four samples; `more` goes into its
    table `run`."""
    return f"""
[run]
id = "{run_id}"
num_steps = {num_steps}
prompts_per_step = 4
samples_per_prompt = 4
{more}

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

[trainer]
learning_rate = {learning_rate}

[workers]
heartbeat_seconds = 0.2

[scaling]
api = "off"
"""


def snapshot_of(folder: Path) -> dict[str, Any]:
    """Return the data that the page of a run's report holds."""
    page = (folder / "report.html").read_text()
    begin = page.index('id="snapshot">') + len('id="snapshot">')
    found: dict[str, Any] = orjson.loads(page[begin : page.index("</script>", begin)])
    return found


def sample_events(run: FinishedRun, entity: str) -> list[Event]:
    """Return the events of a sample topic."""
    plan, codec = TopicPlan.from_config(run.config), EventCodec()
    reader = LogReader(Connection.from_config(run.config.broker, client_id="test"))
    topic_partitions = [
        (plan.topic(entity), partition) for partition in range(plan.num_sample_partitions)
    ]
    found = [
        event
        for record in reader.read_to_end(topic_partitions)
        for event in split_samples(codec.decode(record.value))
    ]
    reader.close()
    return found


def run_on_policy(
    prepared: Path,
    folder: Path,
    bootstrap_servers: str,
    sections: str,
    *,
    learning_rate: float = 1e-3,
    num_steps: int = 3,
    timeout_seconds: float = 200.0,
) -> FinishedRun:
    """Run to the end, strictly on-policy, with these sections after those of `run_file_text`."""
    run_file = folder / "run.toml"
    more = f'directory = "{folder / ".relax"}"\nmode = "sync"\nmax_staleness = 0'
    text = run_file_text(
        prepared,
        f"t-{uuid.uuid4().hex[:12]}",
        more=more,
        learning_rate=learning_rate,
        num_steps=num_steps,
    )
    run_file.write_text(f'{text}{sections}\n[broker]\nbootstrap_servers = "{bootstrap_servers}"\n')
    ended = call_relax("run", run_file, cwd=folder, timeout_seconds=timeout_seconds)
    assert ended.code == 0, ended.err
    return FinishedRun(run_file, load_run_config(run_file, environment={}))
