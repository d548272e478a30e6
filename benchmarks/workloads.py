"""The paper's workloads on the real bus and the real roles, with engine and trainer that take the
paper's time (scaled) and compute nothing.

Each mode is a `relax run`; next to its step time stands the shortest that the schedule allows
(`benchmarks.step_simulator`).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks import report
from benchmarks.profiles import MODES, WORKLOADS, Mode, Workload
from benchmarks.step_simulator import Schedule, StepSimulator, repeat_lengths
from benchmarks.timed_run import Stage, TimedRun, open_stage, show


def measure(stage: Stage, workload: Workload, mode: Mode) -> dict[str, Any]:
    """Run one mode and set its step next to the bound, both in the paper's seconds, over the same
    steps."""
    run, time_scale = TimedRun(stage, workload, mode), workload.time_scale
    data = run.finish(run.start())
    step = statistics.mean(data["curves"]["step_seconds"][mode.first_step :]) / time_scale
    bound = bound_seconds(run)
    joins = run.timeline().join_seconds()
    return {
        "workload": workload.name,
        "mode": mode.name,
        "step_seconds": step,
        "bound_seconds": bound,
        "lost_real_milliseconds": (step - bound) * time_scale * 1000,
        "paper_step_seconds": workload.paper_step_seconds.get(mode.name),
        "real_phase_seconds": {
            name: statistics.mean(values[mode.first_step :])
            for name, values in data["curves"]["phase_seconds"].items()
        },
        "real_join_milliseconds": {
            "median": 1000 * joins[len(joins) // 2],
            "p99": 1000 * joins[len(joins) * 99 // 100],
        },
        "staleness_mean": data["staleness_mean"],
        "outcomes": data["outcomes"],
    }


def bound_seconds(run: TimedRun) -> float:
    """Return the shortest time of a step, in the paper's seconds, over the steps that are
    measured."""
    mode = run.mode
    workload = run.workload
    schedule = Schedule(
        num_steps=mode.num_steps,
        prompts_per_step=workload.prompts_per_step,
        max_staleness=mode.max_staleness,
        colocated=mode.colocated,
        weight_update_mode="in_flight",
        leases_per_engine=workload.lanes_per_engine,
        slots_per_engine=workload.lanes_per_engine * workload.samples_per_prompt,
    )
    lengths = repeat_lengths(run.sampled_lengths())
    published = StepSimulator(run.timing, schedule, lengths).run().published
    return (published[-1] - published[mode.first_step]) / (mode.num_steps - mode.first_step)


def lay_out_rows(measured: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """Write the metrics of every run for people."""
    colocated = {one["workload"]: one for one in measured if one["mode"] == "colocate"}
    return [lay_out_row(one, colocated[one["workload"]]) for one in measured]


def lay_out_row(one: dict[str, Any], colocated: dict[str, Any]) -> dict[str, str]:
    """Write the metrics of one run."""
    paper = WORKLOADS[one["workload"]].paper_step_seconds
    step = paper.get(one["mode"])
    return {
        "workload": one["workload"],
        "mode": one["mode"],
        "step": f"{one['step_seconds']:.1f}",
        "bound": f"{one['bound_seconds']:.1f}",
        "bound / step": f"{one['bound_seconds'] / one['step_seconds']:.1%}",
        "speed-up": f"{colocated['step_seconds'] / one['step_seconds']:.2f}x",
        "bound's speed-up": f"{colocated['bound_seconds'] / one['bound_seconds']:.2f}x",
        "paper's step": f"{step:.1f}" if step else "-",
        "paper's speed-up": f"{paper['colocate'] / step:.2f}x" if step else "-",
        "lost per step, real ms": f"{one['lost_real_milliseconds']:.0f}",
        "last sample to trainer, real ms": f"{one['real_join_milliseconds']['median']:.0f}",
        "mean staleness": f"{one['staleness_mean']:.2f}",
    }


def shortened(mode: Mode) -> Mode:
    """Return a mode with three steps to measure."""
    return replace(mode, num_steps=mode.first_step + 3)


def main() -> None:
    """Measure both workloads in all modes, and write the page."""
    parser = argparse.ArgumentParser(
        description="The paper's workloads, timed, on the real bus and roles."
    )
    parser.add_argument(
        "--bootstrap-servers", help="a broker that runs; default: one of the benchmark's own"
    )
    parser.add_argument(
        "--slower",
        type=float,
        default=1.0,
        help="stretch all times by this factor, so that the pipeline's own work weighs less",
    )
    parser.add_argument(
        "--workload",
        choices=sorted(WORKLOADS),
        help="measure this alone, print the metrics, write no page",
    )
    parser.add_argument("--mode", choices=[mode.name for mode in MODES], help="likewise")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="fewer steps and modes; prints the metrics, writes no page",
    )
    arguments = parser.parse_args()
    modes = [mode for mode in MODES if arguments.mode in (None, mode.name)]
    if arguments.quick:
        modes = [
            shortened(mode)
            for mode in modes
            if mode.name in ("colocate", "async K=1", arguments.mode)
        ]
    workloads = [
        replace(workload, time_scale=workload.time_scale * arguments.slower)
        for name, workload in WORKLOADS.items()
        if arguments.workload in (None, name)
    ]
    if arguments.quick:
        workloads = workloads[:1]
    with open_stage(arguments.bootstrap_servers) as stage:
        measured = []
        for workload in workloads:
            for mode in modes:
                measured.append(measure(stage, workload, mode))
                show(measured[-1])
    if not (arguments.workload or arguments.mode or arguments.quick):
        report.write(
            "workloads",
            title="The paper's workloads",
            command="python -m benchmarks.workloads",
            rows=lay_out_rows(measured),
            data=measured,
        )


if __name__ == "__main__":
    main()
