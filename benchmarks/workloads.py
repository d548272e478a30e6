"""The paper's workloads on the real bus and the real roles, with engine and trainer that take the
paper's time (scaled) and compute nothing.

Each mode is a `relax run`; next to its step time stands the shortest that the schedule allows
(`benchmarks.critical_path`).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks import report, scaling
from benchmarks.critical_path import CriticalPath, Schedule
from benchmarks.profiles import MODES, WORKLOADS, Mode, Workload
from benchmarks.timed_run import Stage, TimedRun, open_stage, show

EFFICIENCY_GOAL = 0.95
QUESTION = """\
Does the pipeline give away what asynchrony wins? All roles, the broker and the log are real. The engine and the trainer's backend are stand-ins
that sleep for as long as the paper's would compute: {scales}.
Records have their real size, but for the 4B workload's, which carry one token for 16.

{workloads}
- Lengths are log-normal with a cap, sampled from each sample's seed. An engine on d devices gives each of n running samples
  `d * peak / (n + d * half_load)` tokens per second. Training and forward passes take device seconds per token, divided by the role's devices.
- Colocate: rollout and training take turns on all devices and pay for two switches a step. The others split the devices; a publication stops each
  engine while it loads. `peak`, `half_load` and the device seconds were fitted to the paper's colocated step and to the share of rollout in it;
  where that leaves a choice, the split pools are balanced. The other modes follow: their bounds, compared with the paper's steps, test the model.
- The bound is a discrete-event calculation over the same lengths in which moving data costs nothing and no process waits for a core.

Step and bound are in the paper's seconds; the steps that carry the start are left out of both."""


def measure(stage: Stage, workload: Workload, mode: Mode) -> dict[str, Any]:
    """Run one mode and set its step next to the bound, both in the paper's seconds, over the same
    steps."""
    run, time_scale = TimedRun(stage, workload, mode), workload.time_scale
    data = run.finish(run.start())
    timeline = run.timeline()
    steps = range(mode.first_step, mode.num_steps)
    step = statistics.mean(data["curves"]["step_seconds"][mode.first_step :]) / time_scale
    bound = bound_seconds(run)
    joins = timeline.join_seconds()
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
        "real_stage_seconds": timeline.stage_seconds(steps, max_staleness=mode.max_staleness),
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
    schedule = Schedule(
        num_steps=mode.num_steps,
        max_staleness=mode.max_staleness,
        colocated=mode.colocated,
        weight_update_mode="in_flight",
        lanes_per_engine=run.workload.lanes_per_engine,
    )
    published = CriticalPath(run.timing, schedule, run.sampled_lengths()).run()
    return (published[-1] - published[mode.first_step]) / (mode.num_steps - mode.first_step)


def rows_of(measured: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """Write the metrics of every run for people."""
    colocated = {one["workload"]: one for one in measured if one["mode"] == "colocate"}
    return [row_of(one, colocated[one["workload"]]) for one in measured]


def row_of(one: dict[str, Any], colocated: dict[str, Any]) -> dict[str, str]:
    """Write those of one."""
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


def stage_row_of(one: dict[str, Any]) -> dict[str, str]:
    """Write where the time of a step went, in real milliseconds."""
    spent = {
        **one["real_stage_seconds"],
        **{f"trainer: {name}": seconds for name, seconds in one["real_phase_seconds"].items()},
    }
    return {
        "workload": one["workload"],
        "mode": one["mode"],
        **{name: f"{1000 * seconds:.0f}" for name, seconds in spent.items()},
    }


def conclusion_of(measured: Sequence[dict[str, Any]]) -> str:
    """Say which aims were reached, and what the rest would be at the paper's own speed."""
    sentences = []
    for name, workload in WORKLOADS.items():
        runs = {one["mode"]: one["step_seconds"] for one in measured if one["workload"] == name}
        fastest = min((seconds, mode) for mode, seconds in runs.items() if mode.startswith("async"))
        speedup = runs["colocate"] / fastest[0]
        reached = "reached" if speedup >= workload.goal_speedup else "missed"
        others = ", ".join(
            f"{runs['colocate'] / seconds:.2f}x at {mode.removeprefix('async ')}"
            for mode, seconds in runs.items()
            if "K=" in mode
        )
        sentences.append(
            f"{name}: async over colocate {others}; the aim of {workload.goal_speedup}x is "
            f"{reached}."
        )
    worst = min(measured, key=lambda one: one["bound_seconds"] / one["step_seconds"])
    ratio = worst["bound_seconds"] / worst["step_seconds"]
    verdict = "reached" if ratio >= EFFICIENCY_GOAL else "missed"
    sentences.append(
        f"The least efficient mode ({worst['workload']}, {worst['mode']}) is at {ratio:.1%} "
        f"of its bound; the aim of 95 % is {verdict}."
    )
    lost = max(one["lost_real_milliseconds"] for one in measured)
    real = min(
        one["bound_seconds"] / (one["bound_seconds"] + one["lost_real_milliseconds"] / 1000)
        for one in measured
    )
    sentences.append(
        f"What a step loses is the pipeline's own work (at most {lost:.0f} ms here: "
        "publication, prompts, joins, commit, and waiting for a core). "
        "It does not grow with the length of a step: at the paper's own speed it would "
        f"leave {real:.2%}."
    )
    return " ".join(sentences)


def question() -> str:
    """Say what is measured, and under which model."""
    names = [
        (
            f"- `{workload.name}`: {workload.title}; a step takes {workload.prompts_per_step} "
            f"prompts x {workload.samples_per_prompt} samples."
        )
        for workload in WORKLOADS.values()
    ]
    scales = " and ".join(
        f"{workload.time_scale:g} s for a second of the paper's ({name})"
        for name, workload in WORKLOADS.items()
    )
    return QUESTION.format(scales=scales, workloads="\n".join(names))


def shortened(mode: Mode) -> Mode:
    """Return a mode with three steps to measure."""
    return replace(mode, num_steps=mode.first_step + 3)


def main() -> None:
    """Measure both workloads in all modes, then the scaling, and write both pages."""
    parser = argparse.ArgumentParser(
        description=(
            "The paper's workloads, timed, on the real bus and roles; then the cost per sample "
            "by workers."
        )
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
        if arguments.workload or arguments.mode:
            return
        if not arguments.quick:
            report.write(
                "workloads",
                title="The paper's workloads",
                question=question(),
                command="python -m benchmarks.workloads",
                rows=rows_of(measured),
                tables={
                    "Where the time of a step goes, in real milliseconds": [
                        stage_row_of(one) for one in measured
                    ]
                },
                conclusion=conclusion_of(measured),
                data=measured,
            )
        scaling.measure_all(stage, quick=arguments.quick)


if __name__ == "__main__":
    main()
