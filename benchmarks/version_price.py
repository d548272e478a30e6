"""The price of a policy version: processor time, seconds and memory, on the trainer that publishes
it and on a worker that loads it, at the published shape of Qwen3-0.6B.

`python -m benchmarks.version_price` measures this checkout; with `--before FOLDER` also another one,
in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.trainer_memory import make_model

NUM_VERSIONS = 5
GOAL_SECONDS_PER_GB = 1.0
LARGER = {"4B": 8.04e9, "8B": 16.4e9, "30B-A3B": 61.1e9}
"""Bytes of the weights of Qwen3 models in bfloat16, from their published shapes."""
GOAL_SHARE = 0.02
QUESTION = """A trainer publishes versions of a model with random weights in the published shape of Qwen3-0.6B ({gigabytes:.2f} GB in bfloat16, without its
optimizer, which publishing does not touch) to a store on this machine's disk, and a worker with engine `transformers` loads each, with default settings, one after the other, on the CPU;
{versions} versions, of which the first warms up. *Processor* counts all threads of the process, the kernel's part for it included: user and system
seconds for each GB of weights. *Waits* is how long a train step waits for the trainer to publish, and the worker's samples for the load: with the
default `weights.async_publish = true` the step waits for a copy of the weights, and the next one is trained meanwhile. *Stored* is when the version
is in the store. *Memory* is by how much the resident memory of the process rises at its highest, for a trainer above what it has before its first
version; what a worker maps of the store's files counts, though it is the system's file cache. Medians; load average before the first version: {load:.1f}."""


class Side:
    """A process of a checkout that publishes or loads versions."""

    def __init__(self, stack: ExitStack, tree: Path, side: str, model: Path, uri: str) -> None:
        command = [sys.executable, "-m", "benchmarks.version_price_side", side, str(model), uri]
        self._process = stack.enter_context(
            subprocess.Popen(
                [*command, str(NUM_VERSIONS)],
                cwd=tree,
                env=os.environ | {"PYTHONPATH": str(tree)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        stack.callback(self._process.kill)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout

    def read(self) -> dict[str, Any]:
        """Return the next measurement; log lines are skipped."""
        for line in self._output:
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
        raise SystemExit(f"{self._process.args!r} ended with {self._process.wait()}")

    def send(self, value: object) -> None:
        """Send a line."""
        self._input.write(json.dumps(value) + "\n")
        self._input.flush()


def measure(trees: dict[str, Path], model: Path, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Publish and load versions by each checkout in turn; return what each side measured."""
    found: dict[str, list[dict[str, Any]]] = {}
    with ExitStack() as stack:
        sides = {}
        for name, tree in trees.items():
            uri = (folder / name).as_uri()
            sides[name] = [Side(stack, tree, side, model, uri) for side in ("trainer", "worker")]
            sides[name][1].read()
        for _ in range(NUM_VERSIONS):
            for name, (trainer, worker) in sides.items():
                published = trainer.read()
                worker.send(published)
                loaded = worker.read()
                found.setdefault(f"trainer, {name}", []).append(published)
                found.setdefault(f"worker, {name}", []).append(loaded)
                print(name, published, loaded, file=sys.stderr, flush=True)
                trainer.send("next")
    return found


def row(name: str, measured: Sequence[dict[str, Any]], num_bytes: int) -> dict[str, str]:
    """Lay a side's measurements out."""
    middle = {
        key: statistics.median(one[key] for one in measured[1:])
        for key, value in measured[0].items()
        if isinstance(value, float | int)
    }
    gigabytes = num_bytes / 1e9
    processor = (middle["user"] + middle["system"]) / gigabytes
    return {
        "side": name,
        "processor, s/GB": f"{processor:.2f}",
        "user + system": f"{middle['user'] / gigabytes:.2f} + {middle['system'] / gigabytes:.2f}",
        "waits, s": f"{middle['seconds']:.2f}",
        "stored, s": f"{middle.get('stored_seconds', middle['seconds']):.2f}"
        if name.startswith("trainer")
        else "",
        "memory, GB": f"{middle['bytes'] / 1e9:.2f}",
        "waits at 4B, s": f"{middle['seconds'] * LARGER['4B'] / num_bytes:.1f}",
    } | {
        f"processor at {model}, s": f"{processor * larger / 1e9:.0f}"
        for model, larger in LARGER.items()
    }


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description="The price of a policy version.")
    parser.add_argument("--model", type=Path, help="folder of the model; made where it is missing")
    parser.add_argument("--before", type=Path, help="a checkout to compare with")
    given = parser.parse_args()
    load = os.getloadavg()[0]
    trees = {"before": given.before.resolve()} if given.before else {}
    trees["now"] = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="relax-version-") as folder:
        model = given.model or Path(folder) / "model"
        if not model.exists():
            make_model(model)
        num_bytes = sum(file.stat().st_size for file in model.glob("*.safetensors"))
        found = measure(trees, model, Path(folder))
    rows = [row(name, measured, num_bytes) for name, measured in sorted(found.items())]
    ours = {one["side"]: float(one["processor, s/GB"]) for one in rows}
    reached = max(ours["trainer, now"], ours["worker, now"]) <= GOAL_SECONDS_PER_GB
    waits = {one["side"]: float(one["waits at 4B, s"]) for one in rows}["trainer, now"]
    report.write(
        "version-price",
        title="The price of a policy version",
        question=QUESTION.format(gigabytes=num_bytes / 1e9, versions=NUM_VERSIONS, load=load),
        command="python -m benchmarks.version_price"
        + (" --before CHECKOUT" if given.before else ""),
        rows=rows,
        conclusion=f"A GB of weights costs the trainer {ours['trainer, now']:.2f} and a worker "
        f"{ours['worker, now']:.2f} processor seconds (aim: at most {GOAL_SECONDS_PER_GB:g} each; "
        f"{'reached' if reached else 'missed'}). A step of the 4B model waits {waits:g} s by this: at "
        f"most {GOAL_SHARE:.0%} of a step that takes {waits / GOAL_SHARE:.0f} s or longer. What larger "
        "models cost is this price times their bytes; they were not run. From a GPU the copy goes "
        "through the bus instead; one publication there is in [train steps on one GPU](gpu-steps.md).",
        data=found,
    )


if __name__ == "__main__":
    main()
