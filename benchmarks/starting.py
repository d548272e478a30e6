"""What it saves to fork workers from a process that has imported what they need: `python -m
benchmarks.starting`."""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks import report
from benchmarks.timed_run import show
from relax_events.config import load_run_config
from relax_events.launcher.fork_client import ForkServer
from relax_events.launcher.fork_protocol import SpawnRequest, worker_environment
from relax_events.launcher.worker_processes import worker_modules

NUM_ROUNDS = 5
RUN_FILE = Path("configs/quickstart.toml")
PROGRAM = "benchmarks.started"
AGAIN = "rollout"
PATIENCE_SECONDS = 120.0
LOOK_SECONDS = 0.002
WHAT = {
    "all": "s until all workers of the quickstart have imported what they need",
    "again": f"s until one more, of role {AGAIN}, has",
    "cpu": "CPU seconds of both",
    "memory": "MiB of all, shared pages divided among those that share them",
}
QUESTION = """\
The {num} workers of the quickstart are started on this machine, {cores} cores, with what they import and nothing else; then one more, as after a
crash. Each by itself, as `python -m` starts it; and forked from a process that has imported it all for the first that needs it, its own start
included. {rounds} rounds, both ways in turn. The machine's load average before the first round was {load:.1f}."""

Start = Callable[[str, Path], int]
"""Starts a role's process with a log, and returns its id."""


def by_itself(
    modules: Mapping[str, Sequence[str]], folder: Path
) -> tuple[Start, Callable[[], None]]:
    """Return what starts a process as a shell does, and what ends all of them."""
    started: list[subprocess.Popen[bytes]] = []

    def start(role: str, log: Path) -> int:
        with log.open("wb") as file:
            command = [sys.executable, "-m", PROGRAM, *modules[role]]
            started.append(
                subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=file, env=worker_environment()
                )
            )
        return started[-1].pid

    def end() -> None:
        for process in started:
            process.kill()
            process.wait(PATIENCE_SECONDS)

    return start, end


def forked(modules: Mapping[str, Sequence[str]], folder: Path) -> tuple[Start, Callable[[], None]]:
    """Return what has a process forked, and what ends all of them."""
    starter, pids = ForkServer(worker_environment(), folder / "starter.log"), list[int]()

    def start(role: str, log: Path) -> int:
        order = SpawnRequest(
            PROGRAM, list(modules[role]), worker_environment(), list(modules[role])
        )
        pids.append(starter.spawn(order, log_path=log).pid)
        return pids[-1]

    def end() -> None:
        workers = [psutil.Process(pid) for pid in pids]
        for worker in workers:
            worker.kill()
        psutil.wait_procs(workers, timeout=PATIENCE_SECONDS)
        starter.close()

    return start, end


WAYS = {"each by itself": by_itself, "forked": forked}


def measure(way: str, modules: Mapping[str, Sequence[str]]) -> dict[str, float]:
    """Start all workers and one more, by one way."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        spent, began = _children_seconds(), time.perf_counter()
        start, end = WAYS[way](modules, folder)
        try:
            pids = {
                role: start(role, folder / f"{role}.log")
                for role in sorted(modules, key=lambda role: len(modules[role]))
            }
            for role in modules:
                _await(folder / f"{role}.log")
            all_seconds, began = time.perf_counter() - began, time.perf_counter()
            start(AGAIN, folder / "again.log")
            _await(folder / "again.log")
            again_seconds = time.perf_counter() - began
            memory = sum(psutil.Process(pid).memory_full_info().pss for pid in pids.values())
        finally:
            end()
        return {
            "all": all_seconds,
            "again": again_seconds,
            "cpu": _children_seconds() - spent,
            "memory": memory / 2**20,
        }


def _await(log: Path) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not log.stat().st_size:
        assert time.monotonic() < deadline, f"nothing in {log} within {PATIENCE_SECONDS:g} s"
        time.sleep(LOOK_SECONDS)


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def row(metric: str, rounds: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, str]:
    """Write a metric for people."""
    values = {way: [one[way][metric] for one in rounds] for way in WAYS}
    ratio = statistics.median(a / b for a, b in zip(*values.values(), strict=True))
    medians = {
        way: f"{statistics.median(found):.2f}"
        if metric != "memory"
        else f"{statistics.median(found):.0f}"
        for way, found in values.items()
    }
    return {"what": WHAT[metric], **medians, "median of the paired ratios": f"{ratio:.1f}"}


def main(arguments: Sequence[str] = ()) -> None:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS)
    options = parser.parse_args(arguments)
    config, load = load_run_config(RUN_FILE), os.getloadavg()[0]
    modules = {role: worker_modules(config, role) for role in config.roles()}
    rounds: list[dict[str, Any]] = []
    for number in range(options.rounds):
        rounds.append({way: measure(way, modules) for way in WAYS})
        show(
            {
                "round": str(number + 1),
                **{way: f"{found['all']:.1f} s" for way, found in rounds[-1].items()},
            }
        )
    rows = [row(metric, rounds) for metric in WHAT]
    for one in rows:
        show(one)
    ratios = {
        metric: one["median of the paired ratios"] for metric, one in zip(WHAT, rows, strict=True)
    }
    report.write(
        "starting",
        title="How fast workers are there",
        question=QUESTION.format(
            num=len(modules), cores=os.cpu_count(), rounds=options.rounds, load=load
        ),
        command="python -m benchmarks.starting",
        conclusion=f"Forked, the workers of a run are there {ratios['all']} times as soon, and one that "
        f"is started again {ratios['again']} times; "
        f"each by itself they take {ratios['cpu']} times the CPU seconds and "
        f"{ratios['memory']} times the memory. What a worker does after its "
        "imports (connecting, reading its model and the log) is the same both ways and not "
        "in these numbers.",
        rows=rows,
        data={"rounds": rounds, "load": load},
    )


if __name__ == "__main__":
    main(sys.argv[1:])
