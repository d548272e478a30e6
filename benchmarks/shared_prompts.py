"""What a train step saves by computing each prompt once: the trainer's forward and backward, with
and without, sides in turn."""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks import report
from benchmarks.ready_samples import ready_sample
from relax_events.config import RunConfig
from relax_events.events.types import SampleReady
from relax_events.examples.tiny_models import make_tiny
from relax_events.training.backend.torch_backend import TorchBackend
from relax_events.training.ranks import SingleRank

SAMPLES_PER_PROMPT, NUM_GROUPS = 8, 8
PROMPTS, COMPLETIONS = (16, 64, 256), (8, 32, 128)
NUM_ROUNDS = 3
VOCAB_SIZE = 256
QUESTION = f"""Forward and backward of the trainer over {NUM_GROUPS} prompt groups of {SAMPLES_PER_PROMPT} samples: a Qwen3 of width 128 with 4
layers, float32, one thread. Completions are between half and one and a half times as long as the table says. Apart, each sample brings its
prompt; shared (`trainer.share_prompts`), a prompt stands once before its group's completions, wherever the trainer reckons that this is cheaper.
Both sides in turn, medians of {NUM_ROUNDS} rounds; the gradient's norms are compared as well."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Both sides at one pair of lengths: seconds by round, and how far the gradient's norms are
    apart, relative to them."""

    prompt: int
    completion: int
    apart: list[float]
    shared: list[float]
    difference: float

    @property
    def ratio(self) -> float:
        """How many times longer samples apart took."""
        return statistics.median(
            apart / shared for apart, shared in zip(self.apart, self.shared, strict=True)
        )


def samples_of(prompt: int, completion: int) -> list[SampleReady]:
    """Draw the samples of a step."""
    generator = np.random.default_rng([prompt, completion])
    samples = []
    for group in range(NUM_GROUPS):
        given = generator.integers(0, VOCAB_SIZE, prompt).astype(np.int32)
        for index in range(SAMPLES_PER_PROMPT):
            own = int(generator.integers(completion // 2, completion * 3 // 2 + 1))
            tokens = np.concatenate(
                [given, generator.integers(0, VOCAB_SIZE, own).astype(np.int32)]
            )
            mask = np.arange(len(tokens)) >= prompt
            samples.append(
                ready_sample(
                    tokens,
                    num_prompt_tokens=prompt,
                    samples_per_prompt=SAMPLES_PER_PROMPT,
                    group_index=group,
                    sample_index=index,
                    rollout_logprobs=np.where(mask, -np.log(VOCAB_SIZE), 0).astype(np.float32),
                    advantages=(mask * (index - SAMPLES_PER_PROMPT / 2)).astype(np.float32),
                )
            )
    return samples


def backend_of(model: Path, *, share_prompts: bool) -> TorchBackend:
    """Open the trainer's backend."""
    config = {
        "run": {"id": "shared-prompts"},
        "model": {"path": model, "dtype": "float32", "device": "cpu"},
        "data": {"source": "jsonl:unused"},
        "algorithm": {"old_logprobs": "rollout"},
        "engine": {"sampling": {"max_new_tokens": 32}},
        "trainer": {
            "share_prompts": share_prompts,
            "learning_rate": 1e-12,
            "threads": 1,
            "max_tokens_per_micro_batch": 8192,
        },
    }
    return TorchBackend(RunConfig.model_validate(config), ranks=SingleRank())


def step(backend: TorchBackend, samples: Sequence[SampleReady]) -> tuple[float, float]:
    """Train a step; return the seconds of its forward and backward, and the gradient's norm."""
    started = time.perf_counter()
    backend.accumulate(samples)
    seconds = time.perf_counter() - started
    return seconds, backend.step().grad_norm


def measure(model: Path, prompt: int, completion: int, num_rounds: int = NUM_ROUNDS) -> Measured:
    """Measure both sides at one pair of lengths."""
    samples = samples_of(prompt, completion)
    backends = {
        name: backend_of(model, share_prompts=name == "shared") for name in ("apart", "shared")
    }
    norms = {
        name: step(backend, samples)[1] for name, backend in backends.items()
    }  # and a round to get warm
    seconds: dict[str, list[float]] = {name: [] for name in backends}
    for _ in range(num_rounds):
        for name, backend in backends.items():
            seconds[name].append(step(backend, samples)[0])
    measured = Measured(
        prompt,
        completion,
        seconds["apart"],
        seconds["shared"],
        abs(norms["shared"] / norms["apart"] - 1),
    )
    print(
        f"prompt {prompt}, completions {completion}: {measured.ratio:.2f}x",
        file=sys.stderr,
        flush=True,
    )
    return measured


def row_of(one: Measured) -> dict[str, str]:
    """Lay out a measurement."""
    return {
        "prompt tokens": f"{one.prompt:,}",
        "completion tokens": f"{one.completion:,}",
        "apart, ms": f"{1000 * statistics.median(one.apart):,.0f}",
        "shared, ms": f"{1000 * statistics.median(one.shared):,.0f}",
        "apart / shared": f"{one.ratio:.2f}x",
        "gradient norms apart": f"{one.difference:.0e}",
    }


def conclusion_of(found: Sequence[Measured]) -> str:
    """Summarize the results."""
    ordered = sorted(found, key=lambda one: one.ratio)
    least, most = ordered[0], ordered[-1]
    return (
        f"A step takes {least.ratio:.2f} (prompt {least.prompt}, completions "
        f"{least.completion}) to {most.ratio:.2f} times (prompt {most.prompt:,}, "
        f"completions {most.completion}) as long when every sample brings its own prompt. "
        "Around 1 the trainer has kept the samples apart."
    )


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description="What sharing prompts saves in the trainer.")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="short ones alone, one round; prints the metrics, writes no page",
    )
    quick = parser.parse_args().quick
    with tempfile.TemporaryDirectory(prefix="relax-shared-") as folder:
        model = make_tiny(Path(folder) / "model", corpus=["12=21"], hidden_size=128, num_layers=4)
        pairs = [(prompt, completion) for prompt in PROMPTS for completion in COMPLETIONS]
        found = [
            measure(model, *pair, num_rounds=1 if quick else NUM_ROUNDS)
            for pair in (pairs[:2] if quick else pairs)
        ]
    rows = [row_of(one) for one in found]
    if quick:
        print(report.table_of(rows))
        return
    title, command = "Prompts that are computed once", "python -m benchmarks.shared_prompts"
    report.write(
        "shared-prompts",
        title=title,
        question=QUESTION,
        command=command,
        rows=rows,
        conclusion=conclusion_of(found),
    )


if __name__ == "__main__":
    main()
