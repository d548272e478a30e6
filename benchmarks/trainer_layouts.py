"""Tokens a second and memory of a train step: one process, FSDP2 and backend `megatron` in several
layouts.

`python -m benchmarks.trainer_layouts [rounds]` measures each layout once a round, in turn.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
import torch

from benchmarks import report
from benchmarks.rank_processes import clear_peak, peak_bytes, run_ranks, train_as_rank
from benchmarks.ready_samples import random_sample
from relax_events.config import RunConfig
from relax_events.events.types import SampleReady
from relax_events.training.backend.factory import open_backend
from relax_events.training.ranks import Ranks

VOCAB_SIZE, PROMPT_TOKENS, NUM_SAMPLES = 4096, 64, 8
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
MIXTURE: dict[str, Any] = SHAPE | {
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
}
FAMILIES = {"qwen3": SHAPE, "qwen3_moe": MIXTURE}
NUM_STEPS = 3
SETTING_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Setting:
    """A way to train."""

    name: str
    family: str = "qwen3"
    ranks: int = 1
    trainer: dict[str, Any] = field(default_factory=dict)


def megatron(name: str, **parallel: Any) -> Setting:
    """Return a layout of two ranks of backend `megatron`."""
    family = parallel.pop("family", "qwen3")
    return Setting(name, family=family, ranks=2, trainer={"backend": "megatron"} | parallel)


SETTINGS = (
    Setting("1 rank"),
    Setting("2 ranks", ranks=2),
    Setting("2 ranks, FSDP2", ranks=2, trainer={"sharding": "full"}),
    megatron("megatron, 2 data-parallel"),
    megatron("megatron, 2 tensor-parallel", tensor_parallel=2),
    megatron("megatron, 2 stages", pipeline_parallel=2),
    Setting("1 rank, experts", family="qwen3_moe"),
    megatron("megatron, experts over 2", family="qwen3_moe", expert_parallel=2),
)


def make_model(folder: Path, family: str) -> Path:
    """Write a model with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **FAMILIES[family])
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder / family)
    return folder / family


def run_config(model: Path, setting: Setting) -> RunConfig:
    """Return the run file of a setting, with the model of a folder."""
    return RunConfig.model_validate(
        {
            "run": {"id": "trainer-layouts"},
            "model": {"path": model, "dtype": "float32", "device": "cpu"},
            "data": {"source": "jsonl:unused"},
            "algorithm": {"old_logprobs": "rollout"},
            "engine": {"sampling": {"max_new_tokens": 768}},
            "trainer": {
                "learning_rate": 1e-6,
                "threads": 2 // setting.ranks,
                "max_tokens_per_micro_batch": 1024,
                "ranks": setting.ranks,
            }
            | setting.trainer,
        }
    )


def make_samples(step: int) -> list[SampleReady]:
    """Generate a step's samples, the same for all layouts."""
    generator = np.random.default_rng(step)
    samples = []
    for index in range(NUM_SAMPLES):
        num_tokens = int(generator.integers(256, 769))
        samples.append(
            random_sample(
                generator,
                num_tokens,
                vocab_size=VOCAB_SIZE,
                num_prompt_tokens=PROMPT_TOKENS,
                logprob=-9.0,
                group_index=index // 2,
                sample_index=index % 2,
            )
        )
    return samples


def train(model: Path, setting: Setting, ranks: Ranks) -> dict[str, float]:
    """Train some steps in this process; return tokens a second and the growth of memory."""
    before = psutil.Process().memory_info().rss
    config = run_config(model, setting)
    backend = open_backend(config, ranks)
    clear_peak()
    speeds = []
    for step in range(NUM_STEPS + 1):  # the first one allocates every buffer
        samples = make_samples(step)
        groups = [samples[first : first + 2] for first in range(0, NUM_SAMPLES, 2)]
        started = time.perf_counter()
        for group in groups[ranks.at.data :: ranks.topology.data]:
            backend.accumulate(group)
        backend.step()
        num_tokens = sum(len(np.asarray(sample.tokens)) for sample in samples)
        speeds.append(num_tokens / (time.perf_counter() - started))
    return {"speed": median(speeds[1:]), "bytes": peak_bytes() - before}


def measure(folder: Path, setting: Setting) -> dict[str, float]:
    """Run a setting, each rank in a process of its own."""
    results = run_ranks(
        "benchmarks.trainer_layouts",
        ["--model", str(folder / setting.family), "--setting", str(SETTINGS.index(setting))],
        num_ranks=setting.ranks,
        timeout_seconds=SETTING_SECONDS,
    )
    print(setting.name, results, file=sys.stderr, flush=True)
    return {
        "speed": min(one["speed"] for one in results),
        "bytes": max(one["bytes"] for one in results),
    }


def lay_out(rounds: list[list[dict[str, float]]]) -> list[dict[str, str]]:
    """Make the table's rows: each family's first layout is what the others are compared with."""
    rows = []
    for index, setting in enumerate(SETTINGS):
        first = next(at for at, one in enumerate(SETTINGS) if one.family == setting.family)
        speeds = [results[index]["speed"] for results in rounds]
        ratios = [results[index]["speed"] / results[first]["speed"] for results in rounds]
        rows.append(
            {
                "layout": setting.name,
                "tokens a second": f"{median(speeds):,.0f}",
                "of one rank's": f"{median(ratios):.2f}",
                "memory, GB": f"{median(results[index]['bytes'] for results in rounds) / 1e9:.2f}",
            }
        )
    return rows


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(
        description="Layouts of a trainer, tokens a second and memory."
    )
    parser.add_argument("rounds", type=int, nargs="?", default=5)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--setting", type=int, help="train this one in this process")
    arguments = parser.parse_args()
    if arguments.setting is not None:
        setting = SETTINGS[arguments.setting]
        train_as_rank(
            partial(train, arguments.model, setting),
            run_config(arguments.model, setting).trainer.topology,
            num_ranks=setting.ranks,
            timeout_seconds=SETTING_SECONDS,
        )
        return
    with tempfile.TemporaryDirectory(prefix="relax-layouts-") as name:
        for family in FAMILIES:
            make_model(Path(name), family)
        rounds = [
            [measure(Path(name), setting) for setting in SETTINGS] for _ in range(arguments.rounds)
        ]
    report.write(
        "trainer-layouts",
        title="Layouts of a trainer: tokens a second and memory",
        command=f"python -m benchmarks.trainer_layouts {arguments.rounds}",
        rows=lay_out(rounds),
        data=rounds,
    )


if __name__ == "__main__":
    main()
