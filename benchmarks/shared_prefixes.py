"""What a train step saves by computing once what the token sequences of a micro-batch begin with: the
trainer's forward and backward, with and without, sides in turn."""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks import report
from benchmarks.ready_samples import ready_sample
from relax_events.config import RunConfig
from relax_events.events.types import SampleReady
from relax_events.examples.tiny_models import make_tiny
from relax_events.training.backend.torch_backend import TorchBackend
from relax_events.training.batch.packing import pack
from relax_events.training.ranks import SingleRank

NUM_ROUNDS = 3
VOCAB_SIZE = 256
NUM_TURNS = 8
QUESTION = f"""Forward and backward of the trainer over the samples of a step: a Qwen3 of width 128 with 4 layers, float32, one thread, micro-batches
of at most 16,384 tokens. Apart, each path of a sample is packed as a sequence of its own; shared (`trainer.share_prompts`), what several of them
begin with is computed once. Both sides in turn, medians of {NUM_ROUNDS} rounds. Completions are between half and one and a half times as long as said.

- Prompt group: 8 groups of 8 samples, each a prompt and a completion.
- {NUM_TURNS} turns, edited: 2 groups of 4 episodes of {NUM_TURNS} turns. Before each turn the program drops the thoughts of the turn before, so each turn
  ends a path of its own: {NUM_TURNS} paths.
- {NUM_TURNS} turns, forked: 2 groups of 4 episodes, begun again after the second, fourth and sixth turn: 4 paths.
- {NUM_TURNS} turns, one path: 2 groups of 4 episodes that share their prompt alone.

The gradients' difference is the norm of the difference, relative to the gradient's norm: in the float32 of the timed steps, and in float64, where
transformers' norms still compute in float32."""

Tokens = NDArray[np.int32]
Path_ = tuple[Tokens, NDArray[np.bool_]]
"""Tokens of a path, and which of them are trained."""


@dataclass(frozen=True, slots=True)
class Case:
    """Samples to train, and how they are named on the page."""

    name: str
    lengths: str
    samples: list[SampleReady]


@dataclass(frozen=True, slots=True)
class Measured:
    """Both sides of a case: seconds by round, and how far their gradients are apart."""

    case: Case
    num_tokens: int
    num_shared_tokens: int
    apart: list[float]
    shared: list[float]
    difference: float
    difference_float64: float

    @property
    def ratio(self) -> float:
        """How many times longer sequences apart took."""
        return statistics.median(
            apart / shared for apart, shared in zip(self.apart, self.shared, strict=True)
        )


class TokenSource:
    """Generates the tokens of a case."""

    def __init__(self, seed: int) -> None:
        self.generator = np.random.default_rng(seed)

    def __call__(self, num_tokens: int) -> Tokens:
        return self.generator.integers(0, VOCAB_SIZE, num_tokens).astype(np.int32)

    def about(self, num_tokens: int) -> Tokens:
        """Return between half and one and a half times as many."""
        return self(int(self.generator.integers(num_tokens // 2, num_tokens * 3 // 2 + 1)))


def join(parts: Iterable[tuple[Tokens, bool]]) -> Path_:
    """Return a path of parts that are trained or not."""
    tokens, masks = zip(*((part, np.full(len(part), own)) for part, own in parts), strict=True)
    return np.concatenate(tokens), np.concatenate(masks)


def prompt_group(prompt: int, completion: int) -> Case:
    """Return prompts with completions."""

    def episodes(source: TokenSource, given: Tokens) -> list[Path_]:
        return [join([(given, False), (source.about(completion), True)])]

    samples = samples_of(episodes, prompt=prompt, num_groups=8, samples_per_prompt=8)
    return Case("prompt group", f"prompt {prompt}, completion {completion}", samples)


def edited_turns(scale: int) -> Case:
    """Return episodes whose thoughts are dropped from the history."""

    def episode(source: TokenSource, given: Tokens) -> list[Path_]:
        history, paths = [(given, False)], []
        for _ in range(NUM_TURNS):
            thought, action = source.about(2 * scale), source.about(scale)
            paths.append(join([*history, (thought, True), (action, True)]))
            history += [(action, False), (source(3 * scale), False)]
        return paths

    lengths = f"prompt {4 * scale}, thought {2 * scale}, action {scale}, reply {3 * scale}"
    samples = samples_of(episode, prompt=4 * scale, num_groups=2, samples_per_prompt=4)
    return Case(f"{NUM_TURNS} turns, edited", lengths, samples)


def whole_turns(scale: int, *, forks: Sequence[int]) -> Case:
    """Return episodes that keep their history, and begin again after some turns."""

    def episode(source: TokenSource, given: Tokens) -> list[Path_]:
        turns = [part for _ in range(NUM_TURNS) for part in turn(source)]
        paths = [join([(given, False), *turns])]
        for fork in forks:
            known = [(tokens, False) for tokens, _ in turns[: 2 * fork]]
            rest = [part for _ in range(NUM_TURNS - fork) for part in turn(source)]
            paths.append(join([(given, False), *known, *rest]))
        return paths

    def turn(source: TokenSource) -> list[tuple[Tokens, bool]]:
        return [(source.about(3 * scale), True), (source(3 * scale), False)]

    name = f"{NUM_TURNS} turns, forked" if forks else f"{NUM_TURNS} turns, one path"
    samples = samples_of(episode, prompt=4 * scale, num_groups=2, samples_per_prompt=4)
    return Case(name, f"prompt {4 * scale}, turn {3 * scale}, reply {3 * scale}", samples)


def samples_of(
    episode: Callable[[TokenSource, Tokens], list[Path_]],
    *,
    prompt: int,
    num_groups: int,
    samples_per_prompt: int,
) -> list[SampleReady]:
    """Generate the samples of a step."""
    source, samples = TokenSource(prompt), []
    for group in range(num_groups):
        given = source(prompt)
        for index in range(samples_per_prompt):
            paths = episode(source, given)
            tokens, mask = (np.concatenate(parts) for parts in zip(*paths, strict=True))
            sample = ready_sample(
                tokens,
                num_prompt_tokens=prompt,
                samples_per_prompt=samples_per_prompt,
                group_index=group,
                sample_index=index,
                loss_mask=mask.astype(np.uint8),
                rollout_logprobs=np.where(mask, -np.log(VOCAB_SIZE), 0).astype(np.float32),
                advantages=(mask * (index - samples_per_prompt / 2)).astype(np.float32),
            )
            lengths = [len(path) for path, _ in paths]
            samples.append(replace(sample, path_lengths=lengths if len(lengths) > 1 else []))
    return samples


def backend_of(model: Path, *, is_shared: bool, dtype: torch.dtype = torch.float32) -> TorchBackend:
    """Open the trainer's backend."""
    config = {
        "run": {"id": "shared-prefixes"},
        "model": {"path": model, "dtype": "float32", "device": "cpu"},
        "data": {"source": "jsonl:unused"},
        "algorithm": {"old_logprobs": "rollout"},
        "engine": {"sampling": {"max_new_tokens": 32}},
        "trainer": {
            "share_prompts": is_shared,
            "learning_rate": 1e-12,
            "threads": 1,
            "max_tokens_per_micro_batch": 16384,
        },
    }
    return TorchBackend(RunConfig.model_validate(config), ranks=SingleRank(), dtype=dtype)


def step(backend: TorchBackend, case: Case) -> tuple[float, Tensor]:
    """Train a step; return the seconds of its forward and backward, and the gradient."""
    micro_batches, num_tokens = [[]], 0
    for sample in case.samples:
        num_tokens += len(sample.tokens)
        if num_tokens > 16384:
            micro_batches.append([])
            num_tokens = len(sample.tokens)
        micro_batches[-1].append(sample)
    started = time.perf_counter()
    for micro_batch in micro_batches:
        backend.accumulate(micro_batch)
    seconds = time.perf_counter() - started
    gradient = backend._parameters.gradients.clone()  # noqa: SLF001  # of the flat parameters
    backend.step()
    return seconds, gradient


def difference_of(model: Path, case: Case, dtype: torch.dtype) -> float:
    """Return how far the gradients of both sides are apart, relative to their norm."""
    shared, apart = (
        step(backend_of(model, is_shared=is_shared, dtype=dtype), case)[1]
        for is_shared in (True, False)
    )
    return float((shared - apart).norm() / apart.norm())


def measure(model: Path, case: Case, num_rounds: int = NUM_ROUNDS) -> Measured:
    """Measure both sides of a case."""
    differences = [difference_of(model, case, dtype) for dtype in (torch.float32, torch.float64)]
    backends = {name: backend_of(model, is_shared=name == "shared") for name in ("apart", "shared")}
    for backend in backends.values():
        step(backend, case)  # to get warm
    seconds: dict[str, list[float]] = {name: [] for name in backends}
    for _ in range(num_rounds):
        for name, backend in backends.items():
            seconds[name].append(step(backend, case)[0])
    sharing = backends["shared"]._model.prefix_sharing  # noqa: SLF001
    row = pack(case.samples, vocab_size=VOCAB_SIZE, sharing=sharing)
    measured = Measured(
        case,
        row.num_tokens,
        row.input_ids.size,
        seconds["apart"],
        seconds["shared"],
        *differences,
    )
    print(f"{case.name}, {case.lengths}: {measured.ratio:.2f}x", file=sys.stderr, flush=True)
    return measured


def row_of(one: Measured) -> dict[str, str]:
    """Lay out a measurement."""
    return {
        "samples": one.case.name,
        "tokens": one.case.lengths,
        "tokens of all paths": f"{one.num_tokens:,}",
        "tokens computed once": f"{one.num_shared_tokens:,}",
        "apart, ms": f"{1000 * statistics.median(one.apart):,.0f}",
        "shared, ms": f"{1000 * statistics.median(one.shared):,.0f}",
        "apart / shared": f"{one.ratio:.2f}x",
        "gradients apart, float32": f"{one.difference:.0e}",
        "float64": f"{one.difference_float64:.0e}",
    }


def conclusion_of(found: Sequence[Measured]) -> str:
    """Summarize the results."""
    ordered = sorted(found, key=lambda one: one.ratio)
    least, most = ordered[0], ordered[-1]
    return (
        f"A step takes {least.ratio:.2f} ({least.case.name}; {least.case.lengths}) to "
        f"{most.ratio:.2f} times ({most.case.name}; {most.case.lengths}) as long when every path "
        "is computed by itself."
    )


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description="What sharing prefixes saves in the trainer.")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="short ones alone, one round; prints the metrics, writes no page",
    )
    quick = parser.parse_args().quick
    cases = [
        *(prompt_group(*lengths) for lengths in ((16, 8), (16, 128), (64, 32), (256, 32))),
        *(edited_turns(scale) for scale in (8, 16)),
        *(whole_turns(scale, forks=(2, 4, 6)) for scale in (8, 16)),
        whole_turns(8, forks=()),
    ]
    if quick:
        cases = [case for case in cases if sum(len(one.tokens) for one in case.samples) < 12000]
    with tempfile.TemporaryDirectory(prefix="relax-shared-") as folder:
        model = make_tiny(Path(folder) / "model", corpus=["12=21"], hidden_size=128, num_layers=4)
        found = [measure(model, case, num_rounds=1 if quick else NUM_ROUNDS) for case in cases]
    rows = [row_of(one) for one in found]
    if quick:
        print(report.table_of(rows))
        return
    report.write(
        "shared-prefixes",
        title="Prefixes that are computed once",
        question=QUESTION,
        command="python -m benchmarks.shared_prefixes",
        rows=rows,
        conclusion=conclusion_of(found),
    )


if __name__ == "__main__":
    main()
