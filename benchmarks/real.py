"""Train a real model as a user does, from `relax init` to a chat with the result: `make real`.

SmolLM2-135M-Instruct trains on short word problems of addition, with LoRA and whole. Each form is a
run by the commands that a user types: `relax init`, `plan`, `doctor`, `run`, `models export` and
`serve`. One table has its held-out scores, the time of its steps by phase, and the peak memory of
each worker next to the plan.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import orjson

from benchmarks import report
from benchmarks.real_rows import write_rows

ROOT = Path(__file__).parents[1]
RUN_SECONDS = 3 * 3600.0
"""Deadline of a command."""
SETTINGS = (
    "run.prompts_per_step=8",
    "run.samples_per_prompt=8",
    "engine.max_context_tokens=128",
    "engine.sampling.max_new_tokens=16",
    "algorithm.kl_coefficient=0.0",
    "trainer.warmup_steps=0",
)
FORMS: Mapping[str, tuple[str, ...]] = {
    "lora": ("model.lora.rank=16", "trainer.learning_rate=2e-4"),
    "full": ("trainer.learning_rate=1e-5",),
}
EVALUATION = """
[evaluation]
every = 1000000 # the first version and the last

[[evaluation.datasets]]
name = "heldout"
source = "jsonl:{rows}"
sampling = {{ top_k = 1 }}
"""
REWARD = '''"""The reward of word problems."""

import re


def score(completion: str, *, answer: str) -> float:
    """Return 1 where the last number of a completion is the answer, else 0."""
    return float(re.findall(r"\\d+", completion)[-1:] == [answer])
'''
QUESTION = "Question: Kim has 6 shells and buys 7 more. How many shells does Kim have now?\nAnswer:"


@dataclass(frozen=True, slots=True)
class Walk:
    """What one form of training takes and leaves."""

    folder: Path
    """With the model, the rows and the reward; the runs are written below it."""
    form: str
    seed: int = 0
    num_steps: int = 12
    num_held_out: int = 128

    @property
    def run_id(self) -> str:
        """The run's id."""
        return f"real-{self.form}-{self.seed}"

    @property
    def run_file(self) -> Path:
        """What `relax init` writes."""
        return self.folder / f"{self.run_id}.toml"

    @property
    def overrides(self) -> list[str]:
        """Keys on the command line of `relax plan`, `doctor` and `run`."""
        run = (f"run.num_steps={self.num_steps}", f"run.seed={self.seed}")
        return [*run, f"run.directory={self.folder}", *SETTINGS, *FORMS[self.form]]

    def propose(self) -> None:
        """Write the run file by `relax init`, and add the evaluation of held-out rows."""
        reward = self.folder / "sums.py"
        reward.write_text(REWARD)
        model, data = self.folder / "SmolLM2-135M-Instruct", self.folder / "train.jsonl"
        named = ("--model", model, "--data", data, "--reward", f"{reward}:score")
        relax("init", self.run_file, *named, "--force")
        rows = f"{self.folder / 'heldout.jsonl'}[:{self.num_held_out}]"
        with self.run_file.open("a") as file:
            file.write(EVALUATION.format(rows=rows))

    def read_plan(self) -> dict[str, int]:
        """Return the bytes that `relax plan` gives each worker."""
        plan = orjson.loads(relax("plan", self.run_file, *self.overrides, "--output", "json"))
        workers = [worker for device in plan["devices"] for worker in device["workers"].items()]
        return {worker_id: sum(parts.values()) for worker_id, parts in workers}

    def run(self) -> None:
        """Check the run file, and run it to its goal."""
        relax("doctor", self.run_file, *self.overrides)
        relax("run", self.run_file, *self.overrides)

    def export(self) -> Path:
        """Write the last version as a folder; of LoRA, the adapters."""
        exported = self.folder / f"{self.run_id}-model"
        shutil.rmtree(exported, ignore_errors=True)  # of an earlier measurement
        relax("models", "export", self.run_id, "--to", exported, "--directory", self.folder)
        return exported


def relax(*words: str | Path) -> str:
    """Run the command line, show what it prints, and return it.

    Raises:
        CalledProcessError: It failed; its output is above.
    """
    print(f"$ relax {' '.join(map(str, words))}", flush=True)
    command = [sys.executable, "-m", "relax_events.cli", *map(str, words)]
    lines = []
    with (
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process,
        killed_at_deadline(process),
    ):
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return "".join(lines)


@contextmanager
def killed_at_deadline(process: subprocess.Popen[str]) -> Iterator[None]:
    """Kill a process that the block does not see the end of within `RUN_SECONDS`."""
    timer = threading.Timer(RUN_SECONDS, process.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def read_metrics(walk: Walk) -> list[dict[str, Any]]:
    """Return the lines of the run's `metrics.jsonl`."""
    path = walk.folder / "runs" / walk.run_id / "metrics.jsonl"
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def summarize(walk: Walk, plan: Mapping[str, int]) -> dict[str, Any]:
    """Return a row of the table: scores, seconds of a step by phase, tokens, peaks by the plan."""
    lines = read_metrics(walk)
    scores = [line["reward_mean"] for line in lines if line.get("dataset") == "heldout"]
    steps = [line for line in lines if "train_step" in line]
    phases = sorted({name for step in steps for name in step["phase_seconds"]})
    medians = {
        name: statistics.median(step["phase_seconds"].get(name, 0.0) for step in steps)
        for name in phases
    }
    peaks: dict[str, float] = {}
    for line in lines:
        if (peak := line.get("peak_memory_bytes")) is not None:
            peaks[line["worker_id"]] = max(peak, peaks.get(line["worker_id"], 0.0))
    return {
        "run": walk.run_id,
        "held-out before": f"{scores[0]:.3f}",
        "after": f"{scores[-1]:.3f}",
        "steps": len(steps),
        "seconds of a step": ", ".join(f"{name} {value:.1f}" for name, value in medians.items()),
        "tokens trained": int(sum(step["num_tokens"] for step in steps)),
        "peak of plan, GB": ", ".join(
            f"{worker_id} {peaks[worker_id] / 1e9:.2f} of {planned / 1e9:.2f}"
            for worker_id, planned in plan.items()
        ),
    }


def complete(model: Path) -> str:
    """Load an exported folder in transformers, and return what it answers."""
    from transformers import pipeline

    chat = pipeline("text-generation", model=str(model), tokenizer=str(model), device="cpu")
    messages = [{"role": "user", "content": QUESTION}]
    answer: Any = chat(messages, max_new_tokens=16, do_sample=False)
    return str(answer[0]["generated_text"][-1]["content"])


def chat(model: Path) -> str:
    """Serve an exported folder, and return what it answers to a chat request."""
    token = model / "serve-token"
    token.write_text("a-token-of-the-real-run")
    words = ("serve", model, "--port", "0", "--token-file", token)
    command = [sys.executable, "-m", "relax_events.cli", *map(str, words)]
    variables = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with (
        subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=variables
        ) as server,
        killed_at_deadline(server),
    ):
        try:
            assert server.stdout is not None
            match = next(m for line in server.stdout if (m := re.search(r"http://[^/\s]+", line)))
            body = {
                "model": model.name,
                "messages": [{"role": "user", "content": QUESTION}],
                "max_tokens": 16,
                "temperature": 0.0,
            }
            reply = httpx2.post(
                f"{match[0]}/v1/chat/completions",
                json=body,
                headers={"Authorization": f"Bearer {token.read_text()}"},
                timeout=600.0,
                trust_env=False,
            )
            reply.raise_for_status()
            return str(reply.json()["choices"][0]["message"]["content"])
        finally:
            server.terminate()


def main(arguments: Sequence[str] | None = None) -> None:
    """Walk each form and seed, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=ROOT / ".relax" / "real")
    parser.add_argument("--forms", nargs="+", choices=tuple(FORMS), default=tuple(FORMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--held-out", type=int, default=128)
    options = parser.parse_args(arguments)
    folder = options.folder.resolve()
    write_rows(folder)
    rows, answers = [], {}
    for form in options.forms:
        for seed in options.seeds:
            walk = Walk(folder, form, seed, options.steps, options.held_out)
            walk.propose()
            plan = walk.read_plan()
            walk.run()
            rows.append(summarize(walk, plan))
        model = walk.export()
        answers[form] = {"transformers": complete(model), "served": chat(model)}
        print(json.dumps(answers[form], indent=1), flush=True)
    report.write(
        "real",
        title="A real model: SmolLM2-135M-Instruct on word problems of addition",
        command="make real",
        rows=rows,
        data=answers,
    )


if __name__ == "__main__":
    main()
