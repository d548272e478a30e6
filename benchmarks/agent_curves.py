"""The learning curves of the examples with agents and environments that have a state, from the
reports of finished runs: `python -m benchmarks.agent_curves`, after `relax run` of their run files.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import environment, report
from benchmarks.curve_plot import Curve, small_multiples
from relax_events.config import load_run_config

NAMES = ("deepeyes", "repair", "retrieval", "verifiers")
"""The run files. In Nim against oneself one side wins each game, so its mean reward says nothing."""
METRIC = "reward_mean"
NUM_EDGE_STEPS = 5
QUESTION = (
    "One run of each run file, with its own number of steps, on a machine that did other work too. "
    "Rewards are means of the samples that a train step trained. In the image runs are pale, the "
    "strong line is their moving mean, and each panel has its own axis of rewards."
)


@dataclass(frozen=True, slots=True)
class Example:
    """The curve of a finished run.

    Attributes:
        name: Of its run file.
        seconds: From the first to the last event of the run.
        samples_per_step: Trained in each step.
    """

    name: str
    curve: Curve
    seconds: float
    samples_per_step: int

    @property
    def edges(self) -> tuple[float, float]:
        """The mean reward of the first steps and of the last ones."""
        known = [reward for reward in self.curve.rewards if reward is not None]
        first, last = known[:NUM_EDGE_STEPS], known[-NUM_EDGE_STEPS:]
        return sum(first) / len(first), sum(last) / len(last)


def example_of(name: str, found: Mapping[str, Any]) -> Example:
    """Read an example's curve from its run's report.

    Raises:
        ValueError: The run has not trained all steps of its run file.
    """
    config = load_run_config(environment.ROOT / "configs" / f"{name}.toml", [], environment={})
    curves = found["curves"]
    if len(curves["train_step"]) != config.run.num_steps:
        raise ValueError(
            f"the run of {name} has {len(curves['train_step'])} of {config.run.num_steps} steps; "
            f"finish it with `relax run configs/{name}.toml`"
        )
    return Example(
        name,
        Curve(curves["train_step"], curves[METRIC]),
        found["wall_seconds"],
        config.run.prompts_per_step * config.run.samples_per_prompt,
    )


def rows_of(examples: Sequence[Example]) -> list[dict[str, Any]]:
    """Return a row of the page for each example."""
    return [
        {
            "run file": f"`configs/{one.name}.toml`",
            "steps": len(one.curve.steps),
            "samples a step": one.samples_per_step,
            "first 5 steps": f"{one.edges[0]:.2f}",
            "last 5 steps": f"{one.edges[1]:.2f}",
            "seconds": f"{one.seconds:,.0f}",
        }
        for one in examples
    ]


def publish(examples: Sequence[Example], *, folder: Path = report.FOLDER) -> None:
    """Write the image, then the page."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "agent-curves.svg").write_text(
        small_multiples(
            {one.name: [one.curve] for one in examples},
            title="Reward by train step, a panel for each example",
            own_axes=True,
        )
    )
    risen = [one for one in examples if one.edges[1] > one.edges[0]]
    report.write(
        "agent-curves",
        title="Examples with agents and environments",
        question=f"{QUESTION}\n\n![Reward by train step, a panel for each example](agent-curves.svg)",
        command="python -m benchmarks.agent_curves",
        rows=rows_of(examples),
        conclusion=f"{len(risen)} of {len(examples)} examples end above their beginning.",
        data=[
            {"name": one.name, "steps": list(one.curve.steps), "rewards": list(one.curve.rewards)}
            for one in examples
        ],
        folder=folder,
    )


def main() -> None:
    """Read the reports of all examples, and write the page."""
    parser = argparse.ArgumentParser(
        description="The learning curves of the examples with agents and environments."
    )
    parser.add_argument(
        "--run",
        action="append",
        default=[],
        metavar="NAME=ID",
        help=f"an example's run, where its id is not the name ({', '.join(NAMES)})",
    )
    ids = {name: name for name in NAMES}
    for given in parser.parse_args().run:
        name, _, run_id = given.partition("=")
        if name not in NAMES or not run_id:
            parser.error(f"--run {given}: give NAME=ID, with a name of {', '.join(NAMES)}")
        ids[name] = run_id
    examples = []
    for name, run_id in ids.items():
        path = environment.ROOT / ".relax" / "runs" / run_id / "report.json"
        if not path.is_file():
            raise SystemExit(f"{path} does not exist; run configs/{name}.toml first")
        try:
            examples.append(example_of(name, json.loads(path.read_bytes())))
        except ValueError as error:
            raise SystemExit(str(error)) from None
    publish(examples)


if __name__ == "__main__":
    main()
