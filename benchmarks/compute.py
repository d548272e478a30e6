"""What engine, trainer and scorers take a sample without a broker, next to bare loops over the same
samples: processor time on one thread. With `--before CHECKOUT` that checkout takes turns with this
one.

A child process measures one run file, the sides in turn, and prints JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks import report
from benchmarks.quickstart import CONFIG

HERE = Path(__file__).resolve().parent
TASKS = {"quickstart": CONFIG, "long tail": HERE / "long_tail.toml"}
PREPARE_SECONDS, CHILD_SECONDS = 600.0, 900.0
NOW, BEFORE = "now", "before"
PARTS = {
    "generation": ("engine, a step at once", "engine, prompts one by one"),
    "training": ("trainer",),
    "scoring": ("scorer",),
}
QUESTION = """Processor time of one process on one thread, a sample: the samples of a train step, 32 prompts with 8 samples each, without broker and workers.
All sides of a part take the same prompts or samples in turn, in every round another step; medians over steps and rounds.
The machine's load average before the first round was {load:.1f}: what is above its number of cores was there for others, and takes the caches of
all sides.

- Generation: the engine gets the prompts of a step at once, or one before each of its decoding steps. "transformers" is `generate` over all samples,
  padded on the left, with a key and value cache, as TRL calls it; it returns no log-probabilities. "Matrices" are the linear layers and
  attentions of the engine's own prefills and decoding steps (those of a step at once), with nothing between them.
- Training: forward, backward, clipping, AdamW. "transformers, padded" is one batch of all samples, padded, with its loss; "as many tokens" are
  only as many of its rows as hold the tokens that the trainer computes, which computes a prompt once for its samples.
- Scoring: log-probabilities of all completions. "transformers, padded" as in training, without gradients."""


def measure(task: str, folder: Path, num_rounds: int, *, checkout: Path) -> dict[str, list[float]]:
    """Measure a run file in a child process with the package of a checkout.

    Returns:
        Milliseconds of each step by side.
    """
    child = subprocess.run(
        [
            sys.executable,
            str(HERE / "compute_side.py"),
            str(TASKS[task]),
            str(folder),
            str(num_rounds),
        ],
        check=True,
        timeout=CHILD_SECONDS,
        env=os.environ | {"PYTHONPATH": str(checkout)},
        stdout=subprocess.PIPE,
    )
    found: dict[str, list[float]] = json.loads(child.stdout.splitlines()[-1])
    return found


def prepare(folder: Path) -> None:
    """Make the models of the tasks that are not there."""
    for task, run_file in TASKS.items():
        command = [sys.executable, "-m", "relax_events.cli", "models", "prepare", str(run_file)]
        subprocess.run(
            [*command, f"model.path={folder / task}", f"run.directory={folder}"],
            check=True,
            timeout=PREPARE_SECONDS,
            cwd=HERE.parent,
            stdout=subprocess.DEVNULL,
        )


def rows_of(found: Mapping[str, Mapping[str, Sequence[float]]]) -> list[dict[str, str]]:
    """Lay out a task: a row for each side, with the ratio to ours in the same steps.

    Args:
        found: Milliseconds of each step by side, for this checkout and the one before.
    """
    now, before = found[NOW], found.get(BEFORE)
    rows = []
    for side, times in now.items():
        part = side.split(": ")[0]
        ours = now[f"{part}: {PARTS[part][0]}"]
        row = {
            "part": part,
            "side": side.split(": ")[1],
            "ms a sample": f"{statistics.median(times):.3f}",
            "of ours": f"{statistics.median(map(float.__truediv__, times, ours)):.2f}",
        }
        if before is not None:
            is_ours = side.split(": ")[1] in PARTS[part]
            row["before"] = f"{statistics.median(before[side]):.3f}" if is_ours else ""
            ratio = statistics.median(map(float.__truediv__, times, before[side]))
            row["now / before"] = f"{ratio:.2f}" if is_ours else ""
        rows.append(row)
    return rows


def conclusion_of(tables: Mapping[str, Sequence[Mapping[str, str]]]) -> str:
    """Summarize."""
    lines = []
    for task, rows in tables.items():
        of = {(row["part"], row["side"]): row for row in rows}
        lines.append(
            f"- {task}: generation takes {float(of['generation', 'matrices']['of ours']):.0%} of its time in the "
            f"matrices, and transformers {of['generation', 'transformers']['of ours']} times as long as the engine; "
            f"a padded train step takes {of['training', 'transformers, padded']['of ours']} times as long as ours, "
            f"and one of as many tokens {of['training', 'transformers, as many tokens']['of ours']} times."
        )
    return "\n".join(lines)


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description="Engine, trainer and scorers next to bare loops.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="measured steps of a round")
    parser.add_argument("--before", type=Path, help="another checkout, measured in turn")
    parser.add_argument("--models", type=Path, help="where the models are, or are made")
    given = parser.parse_args()
    checkouts = {NOW: HERE.parent} | ({BEFORE: given.before.resolve()} if given.before else {})
    load = os.getloadavg()[0]
    found: dict[str, dict[str, dict[str, list[float]]]] = {
        task: {name: defaultdict(list) for name in checkouts} for task in TASKS
    }
    with tempfile.TemporaryDirectory(prefix="relax-compute-") as name:
        folder = given.models or Path(name)
        prepare(folder)
        for task in list(TASKS) * given.rounds:
            for label, checkout in checkouts.items():
                times = measure(task, folder / task, given.steps, checkout=checkout)
                for side, own in times.items():
                    found[task][label][side] += own
    tables = {task: rows_of(own) for task, own in found.items()}
    report.write(
        "compute",
        title="What engine, trainer and scorers take a sample, and what bare loops take",
        question=QUESTION.format(load=load),
        command=f"python -m benchmarks.compute --rounds {given.rounds} --steps {given.steps}"
        + (" --before CHECKOUT" if given.before else ""),
        tables=tables,
        conclusion=conclusion_of(tables),
        data=found,
    )


if __name__ == "__main__":
    main()
