"""Whole runs next to TRL's GRPOTrainer: the same model, prompts, batch, objective, optimizer and
two cores; throughput, time to a reward, reward.

Sides take turns, each round another seed; ratios are of one round. TRL runs in an environment of
its own (`benchmarks.trl_run`).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import psutil

from benchmarks import environment, quickstart, report
from relax_events.config import load_run_config
from relax_events.kafka.embedded.broker import EmbeddedBroker

NUM_CORES = 2
FIRST_STEADY_STEP = 5
NUM_LAST_STEPS = 10
REWARD_AIM, REWARD_STEPS = 0.9, 5
PREPARE_SECONDS = 600.0
RESUME_SECONDS = 5.0
"""In which a broker that was suspended counts as alive again."""
OBJECTIVE = ("algorithm.kl_coefficient=0.0", "algorithm.old_logprobs=rollout")


@dataclass(frozen=True, slots=True)
class Task:
    """What is trained."""

    name: str
    num_steps: int
    run_file: Path = quickstart.CONFIG

    @property
    def slug(self) -> str:
        """The name as part of a path and of a run's id."""
        return make_slug(self.name)


@dataclass(frozen=True, slots=True)
class Side:
    """One way to train it."""

    name: str
    kind: Literal["on-policy", "async", "trl"]
    overrides: tuple[str, ...] = ()
    threads: int = 1

    @property
    def slug(self) -> str:
        """The name as part of the id of a run, which is always ours."""
        return make_slug(self.name).removeprefix("ours-")


def make_slug(name: str) -> str:
    """Write a name as part of a path and of a run's id."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower())


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One run: lists have an entry for each step; `parts` are mean seconds of a steady step."""

    step_seconds: list[float]
    rewards: list[float]
    completion_tokens: list[float]
    parts: dict[str, float]
    wall_seconds: float
    samples_per_step: int

    @property
    def completions_per_second(self) -> float:
        """Of the steady state."""
        steady = self.step_seconds[FIRST_STEADY_STEP:]
        return self.samples_per_step * len(steady) / sum(steady)

    @property
    def last_reward(self) -> float:
        """Mean over the last steps."""
        return statistics.mean(self.rewards[-NUM_LAST_STEPS:])

    @property
    def seconds_to_reward(self) -> float | None:
        """Seconds of all steps until the reward was reached; None if it never was."""
        for end in range(REWARD_STEPS, len(self.rewards) + 1):
            if statistics.mean(self.rewards[end - REWARD_STEPS : end]) >= REWARD_AIM:
                return sum(self.step_seconds[:end])
        return None


Outcomes = dict[str, list[Outcome]]
COLOCATED, STREAMING, ASYNC = (
    (f"run.mode={mode}", f"run.max_staleness={staleness}")
    for mode, staleness in (("sync", 0), ("async", 0), ("async", 1))
)
TWO_THREADS = ("engine.threads=2", "trainer.threads=2")
SIDES = (
    Side("ours, on-policy, colocated", "on-policy", COLOCATED),
    Side("ours, on-policy, colocated, 2 threads", "on-policy", (*COLOCATED, *TWO_THREADS)),
    Side("ours, on-policy, streaming", "on-policy", STREAMING),
    Side("ours, async K=1", "async", ASYNC),
    Side("TRL, 1 thread", "trl"),
    Side("TRL, 2 threads", "trl", threads=2),
)
FOLDER = Path(__file__).parent
TASKS = (
    Task("quickstart", num_steps=60),
    Task("long tail", num_steps=40, run_file=FOLDER / "long_tail.toml"),
    Task("equal lengths", num_steps=20, run_file=FOLDER / "equal_lengths.toml"),
)
"""The long tail: nine strings of ten have 5 characters, the tenth has 20 to 28. Equal lengths: all
have 50 to 54. Both train a model twice as wide and deep as the quickstart's."""


def list_overrides(task: Task, side: Side, seed: int) -> list[str]:
    """Return all that differs from the task's run file."""
    return [*OBJECTIVE, *side.overrides, f"run.num_steps={task.num_steps}", f"run.seed={seed}"]


def run_ours(folder: Path, task: Task, side: Side, seed: int) -> Outcome:
    """Run the task by `relax run`."""
    run_report = quickstart.run(
        folder,
        f"{task.slug}-{side.slug}-{seed}",
        list_overrides(task, side, seed),
        run_file=task.run_file,
    )
    curves = run_report["curves"]
    return Outcome(
        step_seconds=curves["step_seconds"],
        rewards=curves["reward_mean"],
        completion_tokens=curves["completion_tokens_mean"],
        parts={
            name: statistics.mean(seconds[FIRST_STEADY_STEP:])
            for name, seconds in curves["phase_seconds"].items()
        },
        wall_seconds=run_report["wall_seconds"],
        samples_per_step=run_report["config"]["run"]["prompts_per_step"]
        * run_report["config"]["run"]["samples_per_prompt"],
    )


def run_trl(folder: Path, task: Task, side: Side, seed: int) -> Outcome:
    """Run the task by TRL, in a process of its own environment."""
    config = load_run_config(
        task.run_file,
        [f"model.path={folder / 'model'}", *list_overrides(task, side, seed)],
        environment={},
    )
    run_file, result = folder / "trl-run.json", folder / "trl-result.json"
    run_file.write_text(config.model_dump_json())
    threads = {"OMP_NUM_THREADS": str(side.threads), "MKL_NUM_THREADS": str(side.threads)}
    started = time.perf_counter()
    environment.run("trl", "-m", "benchmarks.trl_run", str(run_file), str(result), settings=threads)
    wall_seconds = time.perf_counter() - started
    measured: dict[str, Any] = json.loads(result.read_text())
    steady = measured["parts"][FIRST_STEADY_STEP:]
    return Outcome(
        step_seconds=measured["step_seconds"],
        rewards=measured["rewards"],
        completion_tokens=measured["completion_tokens"],
        parts={name: statistics.mean(step[name] for step in steady) for name in steady[0]},
        wall_seconds=wall_seconds,
        samples_per_step=config.run.prompts_per_step * config.run.samples_per_prompt,
    )


@contextmanager
def suspended(broker: EmbeddedBroker) -> Iterator[None]:
    """Let a broker compute nothing during the block: at rest it takes a few percent of a core."""
    process = psutil.Process(broker.pid)
    process.suspend()
    try:
        yield
    finally:
        process.resume()
        time.sleep(RESUME_SECONDS)


def measure(folder: Path, task: Task, sides: Sequence[Side], num_rounds: int) -> Outcomes:
    """Run all sides in turn, each round beginning with another one; our runs share a broker, which
    is suspended while TRL runs.
    """
    folder.mkdir()
    prepare = [
        sys.executable,
        "-m",
        "relax_events.cli",
        "models",
        "prepare",
        str(task.run_file),
        f"model.path={folder / 'model'}",
    ]
    subprocess.run(prepare, check=True, timeout=PREPARE_SECONDS, stdout=subprocess.DEVNULL)
    outcomes: Outcomes = {side.name: [] for side in sides}
    with EmbeddedBroker(folder / "broker") as broker:
        for seed in range(num_rounds):
            first = seed % len(sides)
            for side in (*sides[first:], *sides[:first]):
                if side.kind == "trl":
                    with suspended(broker):
                        outcome = run_trl(folder, task, side, seed)
                else:
                    outcome = run_ours(folder, task, side, seed)
                outcomes[side.name].append(outcome)
                print(
                    (
                        f"{task.name}, {side.name}: {outcome.completions_per_second:.0f} "
                        f"completions/s, reward {outcome.last_reward:.3f}"
                    ),
                    file=sys.stderr,
                )
    return outcomes


def compute_rate(outcomes: Sequence[Outcome]) -> float:
    """Return the median throughput of a side."""
    return statistics.median(outcome.completions_per_second for outcome in outcomes)


def find_best(outcomes: Outcomes, kind: str, sides: Sequence[Side] = SIDES) -> str:
    """Return the fastest side of a kind."""
    return max(
        (side.name for side in sides if side.kind == kind and side.name in outcomes),
        key=lambda name: compute_rate(outcomes[name]),
    )


def ratios(outcomes: Outcomes, side: str, other: str) -> list[float]:
    """Return how many times the throughput of the other a side had, round by round."""
    pairs = zip(outcomes[side], outcomes[other], strict=True)
    return [mine.completions_per_second / theirs.completions_per_second for mine, theirs in pairs]


def lay_out_row(outcomes: Outcomes, side: str) -> dict[str, str]:
    """Sum up a side's runs."""
    side_outcomes = outcomes[side]
    times = ratios(outcomes, side, find_best(outcomes, "trl"))
    reached = [outcome.seconds_to_reward for outcome in side_outcomes]
    seconds = [value for value in reached if value is not None]
    return {
        "side": side,
        "completions/s": f"{compute_rate(side_outcomes):,.0f}",
        "compared with TRL's best": f"{statistics.median(times):.2f}x ({min(times):.2f} to {max(times):.2f})",
        "ms a step": f"{1000 * statistics.median(second for outcome in side_outcomes for second in outcome.step_seconds[FIRST_STEADY_STEP:]):.0f}",
        "tokens a completion": f"{statistics.mean(statistics.mean(outcome.completion_tokens) for outcome in side_outcomes):.1f}",
        f"seconds to reward {REWARD_AIM:g}": f"{statistics.median(seconds):.1f}"
        if len(seconds) == len(reached)
        else f"in {len(seconds)} of {len(side_outcomes)}",
        f"reward of the last {NUM_LAST_STEPS} steps": f"{statistics.median(outcome.last_reward for outcome in side_outcomes):.3f}",
        "start and end, s": f"{statistics.median(outcome.wall_seconds - sum(outcome.step_seconds) for outcome in side_outcomes):.1f}",
        "a step by its parts, ms": ", ".join(
            f"{name} {1000 * second:.0f}" for name, second in mean_parts(side_outcomes).items()
        ),
    }


def mean_parts(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Return where the time of a step went, largest part first."""
    means = {
        name: statistics.mean(outcome.parts[name] for outcome in outcomes)
        for name in outcomes[0].parts
    }
    return dict(sorted(means.items(), key=lambda item: -item[1]))


def publish(task: Task, outcomes: Outcomes, folder: Path = report.FOLDER) -> None:
    """Write the task's page."""
    num_rounds = max(len(runs) for runs in outcomes.values())
    report.write(
        f"trl-{task.slug}",
        title=f"Whole runs compared with TRL {environment.pinned('trl', 'trl')}: {task.name}",
        command=f"python -m benchmarks.trl --task '{task.name}' --rounds {num_rounds}",
        rows=[lay_out_row(outcomes, side) for side in outcomes],
        data={side: [asdict(one) for one in runs] for side, runs in outcomes.items()},
        folder=folder,
    )


def main() -> None:
    """Measure the tasks and write a page for each."""
    parser = argparse.ArgumentParser(
        description="Whole runs compared with TRL's GRPOTrainer, on the same two cores."
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="runs of each side, each with another seed"
    )
    parser.add_argument(
        "--task",
        choices=[task.name for task in TASKS],
        help="measure this alone",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one round of a few steps; prints the metrics, writes no page",
    )
    arguments = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:NUM_CORES])
    num_rounds = 1 if arguments.quick else arguments.rounds
    tasks = [
        replace(task, num_steps=FIRST_STEADY_STEP + 3) if arguments.quick else task
        for task in TASKS
        if arguments.task in (None, task.name)
    ]
    with tempfile.TemporaryDirectory(prefix="relax-trl-") as folder:
        for task in tasks:
            outcomes = measure(Path(folder) / task.slug, task, SIDES, num_rounds)
            if arguments.quick:
                print(
                    report.lay_out_table([lay_out_row(outcomes, side.name) for side in SIDES]),
                    flush=True,
                )
            else:
                publish(task, outcomes)


if __name__ == "__main__":
    main()
