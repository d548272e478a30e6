"""What a sample costs in CPU time and in latency, with 1 to 64 rollout workers that each have the
same work to do."""

from __future__ import annotations

import statistics
import subprocess
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import psutil

from benchmarks import report
from benchmarks.processes import BROKER, RUN, roles_below
from benchmarks.profiles import Lengths, Mode, Pools, Workload
from benchmarks.timed_run import Stage, TimedRun, show

NUM_WORKERS = (1, 4, 16, 64)
SAMPLES_PER_SECOND = 2.0
"""Of each worker."""
LANES = 2
SAMPLES_PER_PROMPT = 2
RECORD_TOKENS = 256
STEP_SECONDS = 4.0
MODE = Mode(name="scaling", colocated=False, max_staleness=2, num_steps=7, first_step=3)
SAMPLING_SECONDS = 0.5
FLAT_RATIO = 1.1


def workload_of(num_workers: int) -> Workload:
    """Give each worker the same speed, and a step as many prompts as come in `STEP_SECONDS`; the
    trainer costs nothing."""
    tokens_per_second = RECORD_TOKENS * SAMPLES_PER_SECOND / (LANES * SAMPLES_PER_PROMPT)
    half_load = 1e6  # so that the speed of a sample does not depend on its neighbours
    return Workload(
        name=f"scaling-{num_workers}",
        title="",
        prompts_per_step=round(
            num_workers * SAMPLES_PER_SECOND * STEP_SECONDS / SAMPLES_PER_PROMPT
        ),
        samples_per_prompt=SAMPLES_PER_PROMPT,
        lengths=Lengths(
            median_tokens=RECORD_TOKENS, sigma=0.3, cap_tokens=4 * RECORD_TOKENS, record_divisor=1
        ),
        num_engines=num_workers,
        lanes_per_engine=LANES,
        peak_tokens_per_second=tokens_per_second * half_load,
        half_load=half_load,
        train_device_seconds=0.0,
        forward_device_seconds=0.0,
        update_seconds=0.0,
        switch_seconds=(0.0, 0.0),
        load_seconds=0.0,
        colocated=Pools(rollout=num_workers, train=1),
        split=Pools(rollout=num_workers, train=1),
        time_scale=1.0,
        paper_step_seconds={},
        goal_speedup=1.0,
    )


@dataclass(slots=True)
class CpuTimes:
    """CPU seconds and memory of a run's processes by role, read twice a second until the run
    ends."""

    broker_pid: int | None
    seconds: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    memory_bytes: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))

    def watch(self, process: subprocess.Popen[bytes], ended: threading.Event) -> None:
        """Read until the event is set."""
        run = psutil.Process(process.pid)
        roles: dict[psutil.Process, str] = {run: RUN}
        if self.broker_pid is not None:
            roles[psutil.Process(self.broker_pid)] = BROKER
        while not ended.wait(SAMPLING_SECONDS):
            try:
                roles_below(run, roles)
            except psutil.Error:
                return
            self._read(roles)

    def _read(self, roles: dict[psutil.Process, str]) -> None:
        totals: dict[str, float] = defaultdict(float)
        for process, role in roles.items():
            try:
                times, memory = process.cpu_times(), process.memory_info().rss
            except psutil.Error:
                continue
            totals[role] += times.user + times.system
            self.memory_bytes[role].append(memory)
        now = time.time()
        for role, seconds in totals.items():
            self.seconds[role].append((now, seconds))

    def between(self, role: str, start: float, end: float) -> float:
        """Return the CPU seconds that a role used in an interval."""
        return interpolated(self.seconds[role], end) - interpolated(self.seconds[role], start)


def interpolated(points: list[tuple[float, float]], at: float) -> float:
    """Return the value at a time, on the straight line between its neighbours."""
    before = max((point for point in points if point[0] <= at), default=points[0])
    after = min((point for point in points if point[0] >= at), default=points[-1])
    span = after[0] - before[0]
    return before[1] + (after[1] - before[1]) * ((at - before[0]) / span if span else 0.0)


def measure(stage: Stage, num_workers: int) -> dict[str, Any]:
    """Run with so many workers; return milliseconds per sample."""
    run = TimedRun(stage, workload_of(num_workers), MODE)
    times, ended = CpuTimes(stage.broker_pid), threading.Event()
    process = run.start()
    watcher = threading.Thread(target=times.watch, args=(process, ended))
    watcher.start()
    try:
        run.finish(process)
    finally:
        ended.set()
        watcher.join()
    timeline = run.timeline()
    start, end = timeline.published[MODE.first_step], timeline.published[MODE.num_steps]
    num_samples = (
        (MODE.num_steps - MODE.first_step) * run.workload.prompts_per_step * SAMPLES_PER_PROMPT
    )
    per_sample = {
        role: 1000 * times.between(role, start, end) / num_samples for role in times.seconds
    }
    joins = timeline.join_seconds(start, end)
    return {
        "num_workers": num_workers,
        "samples_per_second": num_samples / (end - start),
        "cpu_milliseconds_per_sample": per_sample,
        "rollout_memory_bytes": statistics.median(times.memory_bytes["rollout"]),
        "latency_milliseconds": {
            "median": 1000 * joins[len(joins) // 2],
            "p99": 1000 * joins[len(joins) * 99 // 100],
        },
    }


def row_of(one: dict[str, Any]) -> dict[str, str]:
    """Write the metrics of one size for people."""
    cpu = one["cpu_milliseconds_per_sample"]
    shared = sum(value for role, value in cpu.items() if role not in ("rollout", "broker"))
    return {
        "rollout workers": str(one["num_workers"]),
        "samples/s": f"{one['samples_per_second']:.1f}",
        "rollout, CPU ms per sample": f"{cpu['rollout']:.2f}",
        "broker, CPU ms per sample": f"{cpu['broker']:.2f}" if "broker" in cpu else "-",
        "other roles, CPU ms per sample": f"{shared:.2f}",
        "latency, median ms": f"{one['latency_milliseconds']['median']:.0f}",
        "latency, p99 ms": f"{one['latency_milliseconds']['p99']:.0f}",
        "memory of a rollout worker": f"{one['rollout_memory_bytes'] / 2**20:.0f} MiB",
    }


def measure_all(stage: Stage, *, quick: bool = False) -> None:
    """Measure every size and write the page."""
    measured = []
    for num_workers in NUM_WORKERS[1:2] if quick else NUM_WORKERS:
        measured.append(measure(stage, num_workers))
        show(measured[-1])
    if quick:
        return
    costs = [one["cpu_milliseconds_per_sample"]["rollout"] for one in measured]
    flat = "flat" if max(costs) <= FLAT_RATIO * costs[0] else "not flat"
    report.write(
        "scaling",
        title="Cost of a sample by the number of rollout workers",
        question="Each rollout worker is a process with an engine that finishes "
        f"{SAMPLES_PER_SECOND:g} samples of {RECORD_TOKENS} tokens a second, "
        "so the load grows with the workers; every other role is one process. Latency: from "
        "a prompt group's last sample on the log to the "
        "trainer's input.",
        command="python -m benchmarks.workloads",
        rows=[row_of(one) for one in measured],
        conclusion=f"A rollout worker's cost per sample at {measured[-1]['num_workers']} workers is "
        f"{costs[-1] / costs[0]:.2f} times that of one: "
        f"{flat} within 10 %. The other roles' fixed work (heartbeats, commits) is shared by more "
        "samples the more workers there are.",
        data=measured,
    )
