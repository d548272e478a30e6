"""A run watched from outside until it ends: memory and disk of its parts, and what its workers say
of their lag."""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.processes import memory_of, roles_below

ANSWER_SECONDS = 10.0
BLOCK_BYTES = 512
LAG, STEPS = "relax_consumer_lag_records", "relax_train_steps"
CONTROL = "control"
INTERNAL = "broker's own"


@dataclass(frozen=True, slots=True)
class Look:
    """What was seen at one moment.

    Attributes:
        seconds: Since the run's start.
        train_step: Committed steps.
        memory_bytes: Resident, by role.
        disk_bytes: Blocks on disk, by part.
        lag_records: Not read yet, by role; of roles that say nothing there is nothing.
    """

    seconds: float
    train_step: int
    memory_bytes: dict[str, int]
    disk_bytes: dict[str, int]
    lag_records: dict[str, int]


def watch(
    process: subprocess.Popen[bytes], look: Callable[[float], Look], *, every_seconds: float
) -> list[Look]:
    """Look at regular intervals until the process ends."""
    began, looks = time.monotonic(), []
    while process.poll() is None:
        looks.append(look(time.monotonic() - began))
        with suppress(subprocess.TimeoutExpired):
            process.wait(every_seconds)
    return looks


class RunEye:
    """Looks at a run that has a folder and a broker of its own."""

    def __init__(self, process: subprocess.Popen[bytes], *, directory: Path, run_id: str) -> None:
        """Start nothing yet.

        Args:
            process: `relax run`.
            directory: Its `run.directory`.
            run_id: Its name.
        """
        self._root = psutil.Process(process.pid)
        self._known: dict[psutil.Process, str] = {}
        self._directory, self._run = directory, directory / "runs" / run_id

    def look(self, seconds: float) -> Look:
        """Look now."""
        told = list(self._told())
        steps = [value for _, name, value in told if name == f"{STEPS}_total"]
        lag: Counter[str] = Counter()
        for role, name, value in told:
            if name == LAG:
                lag[role] += int(value)
        memory = memory_of(roles_below(self._root, self._known))
        return Look(seconds, int(max(steps, default=0)), memory, self._disk(), dict(lag))

    def _disk(self) -> dict[str, int]:
        run = self._run
        parts = {
            "media": run / "objects/sha256",
            "weights": run / "objects/weights",
            "checkpoints": run / "objects/checkpoints",
        }
        parts |= {
            "logs": run / "logs",
            "figures": run / "metrics.jsonl",
            "media cache": self._directory / "media-cache",
        }
        sizes = {name: blocks_of(path) for name, path in parts.items()}
        for folder in (self._directory / "broker" / "data").glob("*"):
            entity = folder.name.split(".", 2)[-1] if folder.name.startswith("relax.") else INTERNAL
            part = (
                "log, "
                f"{CONTROL if entity.startswith(CONTROL) else INTERNAL if entity == INTERNAL else 'samples and prompts'}"
            )
            sizes[part] = sizes.get(part, 0) + blocks_of(folder)
        return sizes

    def _told(self) -> Iterator[tuple[str, str, float]]:
        """Yield role, name and value of every gauge and counter that the workers serve."""
        for path in sorted((self._run / "logs").glob("*-*.log")):
            port = port_of(path)
            if port is None:
                continue
            try:
                with urllib.request.urlopen(
                    f"http://127.0.0.1:{port}/metrics", timeout=ANSWER_SECONDS
                ) as answer:
                    text = answer.read().decode()
            except OSError:
                continue
            role = path.stem.rpartition("-")[0]
            yield from (
                (role, sample.name, sample.value)
                for family in text_string_to_metric_families(text)
                for sample in family.samples
            )


def port_of(log: Path) -> int | None:
    """Return where a worker serves its metrics, as its log says."""
    with log.open() as lines:
        started = [line for line in lines if '"worker.started"' in line]
    return int(json.loads(started[-1])["metrics_port"]) if started else None


def blocks_of(path: Path) -> int:
    """Return the bytes on disk of a file, or of a folder and all below it; what goes meanwhile
    counts for nothing."""
    if not path.is_dir():
        return path.stat().st_blocks * BLOCK_BYTES if path.exists() else 0
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                total += (Path(folder) / name).lstat().st_blocks * BLOCK_BYTES
            except FileNotFoundError:
                continue
    return total
