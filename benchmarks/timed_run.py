"""Starts whole runs, every role a process of its own, with the timed engine, the timed trainer and
a broker that the runs share."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from benchmarks.profiles import Mode, Timing, Workload, build_timing
from benchmarks.timeline import Timeline
from relax_events.kafka.embedded import EmbeddedBroker
from relax_events.packages.examples.tiny_models import make_tiny
from relax_events.roles.inflight_group import sample_seed
from relax_events.roles.prompt_records import derive_seed
from relax_events.staleness import BatchSlot, IssuedGroup
from relax_events.topics import count_slots

FOLDER = Path(__file__).parent
PROMPTS = [
    (
        f"How many ways lead from one corner of a {number} by {number} board to the other, "
        "entering no field twice?"
    )
    for number in range(3, 35)
]
REWARD = (
    "import zlib\n\n\ndef score(completion, *, answer, metadata, prompt):\n    return "
    "zlib.crc32(completion.encode()) % 1000 / 1000\n"
)
PROMPT_TOKENS = 256
RUN_SECONDS = 300.0
START_SECONDS = 120.0
"""Deadline of a call to the broker: seventy processes that start at once on two cores keep it
waiting."""
NUM_SHARDS = 2


@dataclass(frozen=True, slots=True)
class Stage:
    """Where the runs find the broker, and the model, data and reward that they share."""

    folder: Path
    bootstrap_servers: str
    broker_pid: int | None


@contextmanager
def open_stage(bootstrap_servers: str | None) -> Iterator[Stage]:
    """Start a broker if none is given, and write what the runs share."""
    with tempfile.TemporaryDirectory(prefix="relax-workloads-") as name:
        folder = Path(name)
        make_tiny(folder / "model", corpus=PROMPTS, hidden_size=32, num_layers=1)
        (folder / "prompts.jsonl").write_text(
            "".join(json.dumps({"prompt": prompt, "answer": ""}) + "\n" for prompt in PROMPTS)
        )
        (folder / "reward.py").write_text(REWARD)
        if bootstrap_servers is not None:
            yield Stage(folder, bootstrap_servers, None)
            return
        with EmbeddedBroker(folder / "broker", has_password=False) as broker:
            yield Stage(folder, broker.bootstrap_servers, broker.pid)


def show(measured: Mapping[str, Any]) -> None:
    """Print one run's metrics as a line of JSON, while others are still to come."""
    print(json.dumps(measured), flush=True)


class TimedRun:
    """One run of a workload in a mode."""

    def __init__(self, stage: Stage, workload: Workload, mode: Mode) -> None:
        """Prepare the run's files."""
        self.stage, self.workload, self.mode = stage, workload, mode
        self.run_id = f"{workload.name}-{uuid4().hex[:6]}"
        self.timing: Timing = build_timing(workload, colocated=mode.colocated)
        self._model = stage.folder / f"model-{self.run_id}"
        shutil.copytree(stage.folder / "model", self._model)
        self.timing.write(self._model)

    def start(self) -> subprocess.Popen[bytes]:
        """Start `relax run`."""
        run_file = self.stage.folder / f"{self.run_id}.toml"
        run_file.write_text("")
        overrides = [f"{key}={value}" for key, value in self._settings().items()]
        command = [sys.executable, "-m", "relax_events.cli", "run", str(run_file), *overrides]
        return subprocess.Popen(command, cwd=FOLDER.parent, stdout=subprocess.DEVNULL)

    def finish(self, process: subprocess.Popen[bytes]) -> dict[str, Any]:
        """Wait for the end and return the run's report."""
        try:
            if code := process.wait(RUN_SECONDS):
                raise SystemExit(f"run {self.run_id} ended with code {code}; its output is above")
        finally:
            process.terminate()  # does nothing to one that has ended
            process.wait(60)
        report: dict[str, Any] = json.loads(
            (self.stage.folder / "runs" / self.run_id / "report.json").read_text()
        )
        return report

    def timeline(self) -> Timeline:
        """Read from the log when everything happened."""
        partitions = count_slots(self.mode.max_staleness) * NUM_SHARDS
        return Timeline.read(
            self.stage.bootstrap_servers, run_id=self.run_id, num_sample_partitions=partitions
        )

    def sampled_lengths(self) -> list[list[list[int]]]:
        """Return the completion tokens that the run's seeds stand for, by step, prompt group and
        sample."""
        steps, groups = range(self.mode.num_steps), range(self.workload.prompts_per_step)
        return [[self._group_lengths(BatchSlot(step, index)) for index in groups] for step in steps]

    def _group_lengths(self, slot: BatchSlot) -> list[int]:
        lengths, seed = self.workload.lengths, derive_seed(0, IssuedGroup(slot, 0, 0))
        return [
            lengths.record_tokens(sample_seed(seed, index)) * lengths.record_divisor
            for index in range(self.workload.samples_per_prompt)
        ]

    def _settings(self) -> dict[str, Any]:
        stage, workload, mode = self.stage, self.workload, self.mode
        has_forward = workload.forward_device_seconds > 0
        most_tokens = workload.lengths.max_record_tokens + PROMPT_TOKENS
        return {
            "run.id": self.run_id,
            "run.directory": stage.folder,
            "run.mode": "sync" if mode.colocated else "async",
            "run.max_staleness": mode.max_staleness,
            "run.num_steps": mode.num_steps,
            "run.prompts_per_step": workload.prompts_per_step,
            "run.samples_per_prompt": workload.samples_per_prompt,
            "run.weight_update_mode": "in_flight",
            "model.path": self._model,
            "data.source": f"jsonl:{stage.folder / 'prompts.jsonl'}",
            "broker.bootstrap_servers": stage.bootstrap_servers,
            "broker.request_timeout_seconds": START_SECONDS,
            "broker.partitions_per_version": NUM_SHARDS,
            "engine.name": f"{FOLDER / 'timed_engine.py'}:TimedEngine",
            "engine.max_prompt_groups": workload.lanes_per_engine,
            "engine.max_running_samples": workload.lanes_per_engine * workload.samples_per_prompt,
            "engine.max_context_tokens": most_tokens,
            "engine.threads": 1,
            "engine.sampling.max_new_tokens": workload.lengths.max_record_tokens,
            "reward.function": f"{stage.folder / 'reward.py'}:score",
            "algorithm.kl_coefficient": 0.001 if has_forward else 0.0,
            "algorithm.old_logprobs": "actor" if has_forward else "rollout",
            "trainer.backend": f"{FOLDER / 'timed_trainer.py'}:TimedBackend",
            "trainer.max_tokens_per_micro_batch": max(2048, most_tokens),
            "trainer.checkpoint_every": 1000,
            "trainer.threads": 1,
            "workers.rollout": workload.num_engines,
        }
