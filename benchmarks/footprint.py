"""What a run costs in processor time and memory: the quickstart, watched from outside, per 1,000
samples and by role."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks import report
from benchmarks.processes import BROKER, memory_of, roles_below
from benchmarks.quickstart import CONFIG
from relax_events.config.run_config import HYBRID_PAIRS
from relax_events.runtime.hosting import SEPARATOR

LOOK_EVERY_SECONDS = 0.25
RUN_SECONDS = 900.0
HYBRID = "workers.hybrid=true"
QUESTION = """The quickstart, every role a process of its own and the broker embedded, watched from start to end: {num_samples:,} trained samples.
Start-up is in it: imports, the broker's first seconds, making the model and the data (under "relax run"). Pages of memory that
processes share are divided among them; what stands here is the median of all looks. The rows with two roles are of a second run, with
`workers.hybrid = true`. The machine's load average before the first was {load:.1f}: what is above its number of cores was there for others."""


@dataclass
class Watch:
    """Adds up the resources that the processes of each role used, at their last measurement, and keeps how much
    memory they had at every one."""

    seconds: dict[str, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))
    memory: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    known: dict[psutil.Process, str] = field(default_factory=dict)

    def look(self, root: psutil.Process) -> None:
        """Note the processor time and the memory of the process and all below it."""
        roles = roles_below(root, self.known)
        for process, role in roles.items():
            try:
                times = process.cpu_times()
            except (psutil.NoSuchProcess, psutil.ZombieProcess):
                continue
            self.seconds[role][process.pid] = times.user + times.system
        for role, num_bytes in memory_of(roles).items():
            self.memory[role].append(num_bytes)


def run(folder: Path, *overrides: str) -> tuple[Watch, dict[str, Any]]:
    """Run the quickstart on a broker of its own; return what was seen and the run's report."""
    paths = ["run.id=footprint", f"run.directory={folder}", f"model.path={folder}/model"]
    command = [sys.executable, "-m", "relax_events.cli", "run", str(CONFIG), *paths, *overrides]
    watch = Watch()
    with (folder / "output").open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    root = psutil.Process(process.pid)
    while not has_ended(process):
        watch.look(root)
    if process.returncode:
        raise SystemExit(
            f"the run ended with {process.returncode}:\n{(folder / 'output').read_text()[-2000:]}"
        )
    return watch, json.loads((folder / "runs" / "footprint" / "report.json").read_text())


def has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Wait until the next look is due and report whether the process ended meanwhile."""
    try:
        process.wait(LOOK_EVERY_SECONDS)
    except subprocess.TimeoutExpired:
        return False
    return True


def rows(watch: Watch, num_samples: int) -> list[dict[str, str]]:
    """Lay out the roles, those that used most first."""
    used = {role: sum(by_process.values()) for role, by_process in watch.seconds.items()}
    return [
        {
            "role": role,
            "CPU s per 1,000 samples": f"{used[role] / num_samples * 1000:.2f}",
            "CPU s in all": f"{used[role]:.1f}",
            "memory, MiB": f"{statistics.median(watch.memory[role]) / 2**20:,.0f}",
        }
        for role in sorted(used, key=lambda role: -used[role])
    ]


def paired(watch: Watch) -> float:
    """Return the memory of the roles of `workers.hybrid` in MiB, as one process or two."""
    roles = {name for pair in HYBRID_PAIRS for name in (*pair, SEPARATOR.join(pair))}
    return (
        sum(statistics.median(watch.memory[role]) for role in roles & watch.memory.keys()) / 2**20
    )


def main() -> None:
    """Run, watch and write the page."""
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as other:
        watch, found = run(Path(folder))
        hybrid, hybrid_found = run(Path(other), HYBRID)
    num_samples = int(found["samples_trained"])
    table = rows(watch, num_samples)
    bus = next(row for row in table if row["role"] == BROKER)
    report.write(
        "footprint",
        title="What a run costs in processor time and memory",
        question=QUESTION.format(num_samples=num_samples, load=load),
        command="python -m benchmarks.footprint",
        rows=table + [row for row in rows(hybrid, num_samples) if SEPARATOR in row["role"]],
        conclusion=(
            f"The broker takes {bus['CPU s per 1,000 samples']} s of processor time per 1,000 "
            f"samples and {bus['memory, MiB']} MiB. With `{HYBRID}` the four roles that it pairs "
            f"take {paired(hybrid):,.0f} MiB instead of {paired(watch):,.0f}, and the run "
            f"{hybrid_found['wall_seconds']:.0f} s instead of {found['wall_seconds']:.0f}; mean "
            f"rewards of the last ten steps: {hybrid_found['reward_last_10']:.3f} and "
            f"{found['reward_last_10']:.3f}."
        ),
        data={
            "samples_trained": num_samples,
            "wall_seconds": found["wall_seconds"],
            "hybrid_wall_seconds": hybrid_found["wall_seconds"],
        },
    )


if __name__ == "__main__":
    main()
