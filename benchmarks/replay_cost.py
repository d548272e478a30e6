"""What routing replay costs a train step, on one rank and in backend `megatron`.

`python -m benchmarks.replay_cost [rounds]`: in each round one process trains a step of the same
samples with replay and one without, in turn.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import report
from benchmarks.rank_processes import run_ranks, train_as_rank
from benchmarks.trainer_layouts import Setting, make_model, megatron, run_config, samples_of
from relax_events.events.types import SampleReady
from relax_events.models.routers import Routers
from relax_events.training.backend.factory import open_backend
from relax_events.training.backend.protocol import TrainerBackend
from relax_events.training.ranks import Ranks

SETTINGS = (
    Setting("1 rank", family="qwen3_moe"),
    megatron("megatron, experts over 2", family="qwen3_moe", expert_parallel=2),
)
NUM_SAMPLES, NUM_BATCHES, WARM_UPS = 4, 4, 2
"""Of a step, steps with samples of their own, and steps before those that are measured."""
SETTING_SECONDS = 600.0
QUESTION = f"""A train step of {NUM_SAMPLES} samples of 256 to 768 tokens on a mixture of experts with random weights (6 layers of width 256,
16 experts, 4 for each token, float32), on the CPU with two processors: two threads of one rank, or one thread of each of two. The replayed
experts are those that the model itself chooses, so that with and without replay each expert computes the same tokens. With replay
backend `torch` computes the model's own choice too, backend `megatron` only that of the tokens without a recorded one. A round is one step of
each, with the same samples, one directly after the other, and the first one alternates. The cost is the median over rounds of the ratio of
the two times, less 1, with the bounds that hold 95 % of the medians of resampled rounds."""


def record_experts(model: Path, to: Path) -> None:
    """Write the experts that a model chooses for each token of each sample."""
    from transformers import AutoModelForCausalLM

    module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    routers = Routers(module.model, path=model)
    chosen = {}
    for step in range(NUM_BATCHES):
        for index, sample in enumerate(samples_of(step)[:NUM_SAMPLES]):
            ids = torch.from_numpy(np.asarray(sample.tokens).astype(np.int64))[None]
            with torch.no_grad():
                module.model(ids, use_cache=False)
            chosen[f"{step}.{index}"] = routers.take_choices()[:-1]
    np.savez(to, allow_pickle=False, **chosen)


def take_step(backend: TrainerBackend, samples: Sequence[SampleReady], ranks: Ranks) -> float:
    """Train one step; return its seconds."""
    pairs = [samples[first : first + 2] for first in range(0, NUM_SAMPLES, 2)]
    started = time.perf_counter()
    for pair in pairs[ranks.at.data :: ranks.topology.data]:
        backend.accumulate(pair)
    backend.step()
    return time.perf_counter() - started


def train(model: Path, setting: Setting, num_rounds: int, ranks: Ranks) -> dict[str, Any]:
    """Train with and without replay in turn; return the seconds of each."""
    backends = {}
    for rule in ("none", "rollout"):
        config = run_config(model, setting, routing_replay=rule)
        backends[rule] = open_backend(config, ranks)
    chosen = np.load(model / "experts.npz")
    seconds: dict[str, list[float]] = {rule: [] for rule in backends}
    for at in range(WARM_UPS + num_rounds):
        step = at % NUM_BATCHES
        plain = samples_of(step)[:NUM_SAMPLES]
        routed = [
            replace(sample, routed_experts=chosen[f"{step}.{index}"])
            for index, sample in enumerate(plain)
        ]
        both = [("none", plain), ("rollout", routed)]
        for rule, samples in both if at % 2 else reversed(both):
            taken = take_step(backends[rule], samples, ranks)
            if at >= WARM_UPS:
                seconds[rule].append(taken)
    return seconds


def lay_out(setting: Setting, seconds: dict[str, list[float]]) -> dict[str, str]:
    """Make a row of the table."""
    without, with_replay = (np.array(seconds[rule]) for rule in ("none", "rollout"))
    cost = with_replay / without - 1
    resampled = np.random.default_rng(0).choice(cost, (10_000, len(cost)))
    low, high = np.quantile(np.median(resampled, axis=1), [0.025, 0.975])
    return {
        "layout": setting.name,
        "rounds": str(len(cost)),
        "without, s": f"{np.median(without):.3f}",
        "with replay, s": f"{np.median(with_replay):.3f}",
        "cost of replay": f"{np.median(cost):+.1%}",
        "95 %": f"{low:+.1%} to {high:+.1%}",
    }


def measure(model: Path, index: int, num_rounds: int) -> dict[str, list[float]]:
    """Run a setting, each rank in a process of its own; return what rank 0 measured."""
    given = ["--model", str(model), "--setting", str(index), str(num_rounds)]
    found = run_ranks(
        "benchmarks.replay_cost",
        given,
        num_ranks=SETTINGS[index].ranks,
        timeout_seconds=SETTING_SECONDS,
    )
    seconds: dict[str, list[float]] = found[0]
    print(lay_out(SETTINGS[index], seconds), file=sys.stderr, flush=True)
    return seconds


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description="What routing replay costs a train step.")
    parser.add_argument("rounds", type=int, nargs="?", default=40)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--setting", type=int, help="train this one in this process")
    given = parser.parse_args()
    if given.setting is not None:
        setting = SETTINGS[given.setting]
        train_as_rank(
            partial(train, given.model, setting, given.rounds),
            run_config(given.model, setting).trainer.topology,
            num_ranks=setting.ranks,
            timeout_seconds=SETTING_SECONDS,
        )
        return
    with tempfile.TemporaryDirectory(prefix="relax-replay-") as name:
        model = make_model(Path(name), "qwen3_moe")
        record_experts(model, model / "experts.npz")
        found = [measure(model, index, given.rounds) for index in range(len(SETTINGS))]
    report.write(
        "replay-cost",
        title="What routing replay costs a train step",
        question=QUESTION,
        command=f"python -m benchmarks.replay_cost {given.rounds}",
        rows=[lay_out(setting, one) for setting, one in zip(SETTINGS, found, strict=True)],
        conclusion="The model is small: the larger its experts, the smaller the share of a step that goes to routing. "
        "The bounds hold the noise between rounds, not what makes one of two equal trainers in a process faster.",
        data=found,
    )


if __name__ == "__main__":
    main()
