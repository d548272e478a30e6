"""Every algorithm learns the quickstart task: a run of each with the same steps and seeds.

A run takes a minute or two. What is there already is kept, so the command continues where it was
stopped: `python -m benchmarks.curves`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import environment, quickstart, report
from benchmarks.curve_materials import provide
from relax_events.algorithms.description import installed_algorithms

FOLDER = environment.ROOT / ".relax" / "curves"
NUM_STEPS, NUM_SEEDS = 60, 2
NUM_EDGE_STEPS, REWARD_AIM = 10, 0.8
START = "model.path={materials}/model"
WITHOUT_SAMPLES = ("algorithm.kl_coefficient=0", "algorithm.old_logprobs=trainer")
HELD_OUT = (
    'name = "held-out", source = "reasoning_gym:string_insertion", num_problems = 256, options = '
    "{min_string_length = 5, max_string_length = 5}"
)
EVALUATED = ("evaluation.every=3", f"evaluation.datasets=[{{{HELD_OUT}}}]")
"""For algorithms that generate no samples, so that there are rewards to compare."""
OF_PAIRS = (
    "run.prompts_per_step=96",
    "run.samples_per_prompt=2",
    "data.source=jsonl:{materials}/pairs.jsonl",
    "data.chosen_key=chosen",
    "data.rejected_key=rejected",
    *WITHOUT_SAMPLES,
    *EVALUATED,
)
SETTINGS: dict[str, tuple[str, ...]] = {
    # Right answers have up to 7 of 8 tokens: the penalty would fall on them alone.
    "dapo": ("algorithm.overlong_ratio=0",),
    # The papers' ranges are for large models at small learning rates; here a version moves a whole
    # sample's ratio by several percent.
    "gspo": ("algorithm.clip_low=0.1", "algorithm.clip_high=0.1"),
    "gspo_token": ("algorithm.clip_low=0.1", "algorithm.clip_high=0.1"),
    # Without a ratio in the loss, samples of older versions need a correction.
    "rloo": ("algorithm.old_logprobs=trainer", "algorithm.correction=tis"),
    "gdpo": ("reward.function=benchmarks/curve_rewards.py:in_parts",),
    "opd": ("teacher.model_path={materials}/teacher",),
    "sft": ("run.samples_per_prompt=1", *WITHOUT_SAMPLES, *EVALUATED),
    # A larger beta and smaller steps keep the policy near the reference, without which it forgets
    # the right answers with the wrong ones.
    "dpo": ("algorithm.dpo_beta=1", "trainer.learning_rate=1e-3", *OF_PAIRS),
    "ipo": ("trainer.learning_rate=1e-3", *OF_PAIRS),
}
"""What an algorithm needs besides its name, over the quickstart's run file; of what is not
installed it is not asked."""


@dataclass(frozen=True, slots=True)
class Curve:
    """The reward after each step; None where a step has none."""

    steps: Sequence[int]
    rewards: Sequence[float | None]


@dataclass(frozen=True, slots=True)
class Learnt:
    """One run of an algorithm."""

    algorithm: str
    seed: int
    curve: Curve

    @property
    def first(self) -> float:
        """Reward at the beginning."""
        return self._known()[0][1]

    @property
    def last(self) -> float:
        """Mean reward of the steps, or of the evaluations, at the end."""
        begin = self.curve.steps[-1] - NUM_EDGE_STEPS
        return statistics.mean(reward for step, reward in self._known() if step > begin)

    @property
    def num_steps_to_aim(self) -> int | None:
        """Steps behind the weights that first reached the reward; None if none did."""
        return next((step for step, reward in self._known() if reward >= REWARD_AIM), None)

    def _known(self) -> list[tuple[int, float]]:
        pairs = zip(self.curve.steps, self.curve.rewards, strict=True)
        return [(step, reward) for step, reward in pairs if reward is not None]


def read_learning_curve(data: Mapping[str, Any], algorithm: str, seed: int) -> Learnt:
    """Read a run's report: the rewards of its evaluations where it has any, else of its
    steps.

    Raises:
        ValueError: It has neither.
    """
    curves = data["curves"]
    steps, rewards = curves["train_step"], curves.get("reward_mean", [])
    if data["evaluations"]:
        steps = [row["policy_version"] for row in data["evaluations"]]
        rewards = [row["reward_mean"] for row in data["evaluations"]]
    if not any(reward is not None for reward in rewards):
        raise ValueError(
            f"the run of {algorithm} with seed {seed} reports neither rewards nor "
            "evaluations; give it a dataset to be evaluated on"
        )
    return Learnt(algorithm, seed, Curve(steps, rewards))


def name_result(algorithm: str, seed: int, num_steps: int, folder: Path = FOLDER) -> Path:
    """Return where a run's report is kept, named by all that it depends on."""
    return folder / f"{algorithm.replace('_', '-')}-{num_steps}-{seed}.json"


def run(algorithm: str, seed: int, num_steps: int, folder: Path = FOLDER) -> Learnt:
    """Run an algorithm, or read the report of its run that is there; a stopped run is
    resumed.

    Raises:
        CalledProcessError: The run did not reach its goal, or a model could not be made.
    """
    result = name_result(algorithm, seed, num_steps, folder)
    settings = [
        START,
        f"algorithm.name={algorithm}",
        *SETTINGS.get(algorithm, ()),
        f"run.num_steps={num_steps}",
        f"run.seed={seed}",
    ]
    overrides = provide(settings, folder / "materials")
    if result.exists() and (kept := json.loads(result.read_text()))["overrides"] == overrides:
        return read_learning_curve(kept["report"], algorithm, seed)
    run_folder = folder / result.stem
    data = quickstart.run(run_folder, result.stem, overrides)
    result.write_text(json.dumps({"overrides": overrides, "report": data}))
    shutil.rmtree(run_folder)
    return read_learning_curve(data, algorithm, seed)


def lay_out_rows(learned: Iterable[Learnt]) -> list[dict[str, str]]:
    """Write the runs for people, a row for each algorithm."""
    by_name: dict[str, list[Learnt]] = {}
    for one in learned:
        by_name.setdefault(one.algorithm, []).append(one)
    return [lay_out_row(name, runs) for name, runs in by_name.items()]


def lay_out_row(name: str, runs: Sequence[Learnt]) -> dict[str, str]:
    """Write the runs of one algorithm."""
    steps = [str(one.num_steps_to_aim or "never") for one in runs]
    settings = ", ".join(
        f"`{setting.removeprefix('algorithm.')}`"
        for setting in SETTINGS.get(name, ())
        if not setting.startswith("evaluation.")
    )
    return {
        "algorithm": name,
        "reward of the first step": ", ".join(f"{one.first:.2f}" for one in runs),
        f"of the last {NUM_EDGE_STEPS} steps": ", ".join(f"{one.last:.3f}" for one in runs),
        f"steps to {REWARD_AIM:g}": ", ".join(steps),
        "settings": settings,
    }


def write_conclusion(learned: Sequence[Learnt]) -> str:
    """Say which algorithms learned the task."""
    names = dict.fromkeys(one.algorithm for one in learned)
    slow = sorted({one.algorithm for one in learned if one.num_steps_to_aim is None})
    text = (
        f"{len(names) - len(slow)} of {len(names)} algorithms reach a reward of {REWARD_AIM:g} "
        "with every seed"
    )
    return f"{text}; not so {', '.join(slow)}." if slow else f"{text}."


def publish(
    learned: Sequence[Learnt], *, num_steps: int, num_seeds: int, folder: Path = report.FOLDER
) -> None:
    """Write the page."""
    report.write(
        "curves",
        title="Every algorithm on the quickstart task",
        command=f"python -m benchmarks.curves --steps {num_steps} --seeds {num_seeds}",
        rows=lay_out_rows(learned),
        conclusion=write_conclusion(learned),
        data=[
            {
                "algorithm": one.algorithm,
                "seed": one.seed,
                "steps": list(one.curve.steps),
                "rewards": list(one.curve.rewards),
            }
            for one in learned
        ],
        folder=folder,
    )


def main() -> None:
    """Run what is not there yet, and write the page of all; exit with 1 after the rest if a run
    failed."""
    names = [spec.name for spec in installed_algorithms()]
    parser = argparse.ArgumentParser(
        description="A learning curve of every installed algorithm on the quickstart task."
    )
    parser.add_argument(
        "--algorithm",
        choices=names,
        action="append",
        help="only this one, or these; writes no page",
    )
    parser.add_argument("--steps", type=int, default=NUM_STEPS, help="train steps of a run")
    parser.add_argument("--seeds", type=int, default=NUM_SEEDS, help="runs of each algorithm")
    parser.add_argument("--fresh", action="store_true", help="forget the runs that are there")
    arguments = parser.parse_args()
    if arguments.fresh:
        shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True, exist_ok=True)
    learned, failed = [], []
    for name in arguments.algorithm or names:
        for seed in range(arguments.seeds):
            try:
                learned.append(run(name, seed, arguments.steps))
            except (subprocess.CalledProcessError, ValueError) as error:
                failed.append(name)
                print(f"{name}, seed {seed}: {error}", file=sys.stderr)
    if learned and not arguments.algorithm:
        publish(learned, num_steps=arguments.steps, num_seeds=arguments.seeds)
    elif learned:
        print(report.lay_out_table(lay_out_rows(learned)))
    if failed:
        raise SystemExit(
            f"no curve of {', '.join(dict.fromkeys(failed))}; its output is above, "
            "settings are in benchmarks/curves.py"
        )


if __name__ == "__main__":
    main()
