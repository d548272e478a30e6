"""Memory of a train step: what `relax plan` computes, compared with what processes took, at the published
shape of Qwen3-0.6B.

`python -m benchmarks.trainer_memory` starts a process for each rank of each setting, one setting
after the other.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from benchmarks import report
from benchmarks.head_memory import CLEAR_PEAK, peak_bytes
from benchmarks.rank_processes import run_ranks, train_as_rank
from benchmarks.ready_samples import random_sample
from relax_events.config import RunConfig
from relax_events.events.types import SampleReady
from relax_events.models.checkpoint_facts import read_facts
from relax_events.planning.megatron_memory import memory_of_trainer
from relax_events.training.backend.factory import find_backend
from relax_events.training.ranks import Ranks

SHAPE: dict[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40_960,
}
"""Of the `config.json` that Qwen publishes with Qwen3-0.6B."""
PROMPT_TOKENS = 16
LOGPROB = -11.9
"""About that of each token of the vocabulary under random weights."""
SETTING_SECONDS = 1800.0
QUESTION = """A train step on a model with random weights in the published shape of Qwen3-0.6B (28 layers, width 1,024,
151,936 tokens), bfloat16, on the CPU: one micro-batch of one sample, forward, backward and AdamW. Planned is what `relax plan` computes
for a rank; measured is the largest resident memory of the step less that of the process before it loads the model. Ranks are processes on
this machine, and the largest is shown."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A way to train, and the tokens of its micro-batch."""

    num_tokens: int
    ranks: int = 1
    recomputed: str = "none"
    adapter_rank: int = 0
    backend: str = "torch"

    @property
    def name(self) -> str:
        """Text of the table's row."""
        divided = "sharded" if self.backend == "torch" else "megatron, tensor parallel"
        parts = [f"{self.ranks} ranks, {divided}" if self.ranks > 1 else "1 rank"]
        parts += [f"recompute {self.recomputed}"] if self.recomputed != "none" else []
        parts += [f"LoRA {self.adapter_rank}"] if self.adapter_rank else []
        return ", ".join(parts)


SETTINGS = (
    Setting(256),
    Setting(1024),
    Setting(1024, recomputed="whole"),
    Setting(1024, adapter_rank=16),
    Setting(1024, ranks=2, recomputed="whole"),
    Setting(1024, ranks=2, recomputed="whole", backend="megatron"),
)


def make_model(folder: Path, *, shape: Mapping[str, Any] = SHAPE, device: str = "cpu") -> Path:
    """Write a model with random weights, made on a device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3", **shape)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return folder


def run_config(model: Path, setting: Setting) -> RunConfig:
    """Return the run file of a setting."""
    if setting.backend == "megatron":
        divided: dict[str, Any] = {"backend": "megatron", "tensor_parallel": setting.ranks}
    else:
        divided = {"sharding": "full" if setting.ranks > 1 else "none"}
    lora = {"lora": {"rank": setting.adapter_rank}} if setting.adapter_rank else {}
    return RunConfig.model_validate(
        {
            "run": {"id": "trainer-memory"},
            "model": {"path": model, "dtype": "bfloat16", "device": "cpu"} | lora,
            "data": {"source": "jsonl:unused"},
            "algorithm": {"old_logprobs": "rollout"},
            "engine": {"sampling": {"max_new_tokens": setting.num_tokens}},
            "trainer": {
                "learning_rate": 1e-6,
                "threads": 2 // setting.ranks,
                "max_tokens_per_micro_batch": setting.num_tokens,
                "ranks": setting.ranks,
                "activation_checkpointing": setting.recomputed,
            }
            | divided,
        }
    )


def sample(num_tokens: int, index: int) -> SampleReady:
    """Draw a sample."""
    return random_sample(
        np.random.default_rng(index),
        num_tokens,
        vocab_size=SHAPE["vocab_size"],
        num_prompt_tokens=PROMPT_TOKENS,
        logprob=LOGPROB,
        sample_index=index,
    )


def train(model: Path, setting: Setting, ranks: Ranks) -> dict[str, float]:
    """Train a step in this process; return the peak by which memory rose, in bytes."""
    before = psutil.Process().memory_info().rss
    config = run_config(model, setting)
    backend = find_backend(config.trainer)(config, ranks=ranks)
    loaded = psutil.Process().memory_info().rss
    seconds = []
    for step in range(2):  # the second one has every buffer of the first
        Path("/proc/self/clear_refs").write_text(CLEAR_PEAK)
        started = time.perf_counter()
        backend.accumulate([sample(setting.num_tokens, 2 * step + ranks.at.data)])
        backend.step()
        seconds.append(time.perf_counter() - started)
    return {"bytes": peak_bytes() - before, "loaded": loaded - before, "seconds": seconds[-1]}


def measure(model: Path, setting: Setting) -> dict[str, float]:
    """Run a setting, each rank in a process of its own; return the largest of each number."""
    found = run_ranks(
        "benchmarks.trainer_memory",
        ["--model", str(model), "--setting", str(SETTINGS.index(setting))],
        num_ranks=setting.ranks,
        timeout_seconds=SETTING_SECONDS,
    )
    return {name: max(one[name] for one in found) for name in found[0]}


def planned(model: Path, setting: Setting) -> int:
    """Return what `relax plan` computes, without the process itself."""
    memory = memory_of_trainer(run_config(model, setting), read_facts(model), on_gpu=False)
    parts = memory.parts(setting.num_tokens).parts
    return sum(num_bytes for name, num_bytes in parts.items() if name != "process")


def row(model: Path, setting: Setting) -> dict[str, Any]:
    """Measure a setting and lay it out."""
    found, expected = measure(model, setting), planned(model, setting)
    line = {
        "setting": setting.name,
        "tokens": f"{setting.num_tokens:,}",
        "planned, GB": f"{expected / 1e9:.2f}",
        "measured, GB": f"{found['bytes'] / 1e9:.2f}",
        "planned / measured": f"{expected / found['bytes']:.2f}",
        "of it after loading, GB": f"{found['loaded'] / 1e9:.2f}",
        "seconds": f"{found['seconds']:.1f}",
    }
    print(line, file=sys.stderr, flush=True)
    return line


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description="Memory of a train step, planned and measured.")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--setting", type=int, help="train this one in this process")
    parser.add_argument("--only", type=int, help="measure this one alone, and write no page")
    given = parser.parse_args()
    if given.setting is not None:
        setting = SETTINGS[given.setting]
        train_as_rank(
            partial(train, given.model, setting),
            run_config(given.model, setting).trainer.topology,
            num_ranks=setting.ranks,
            timeout_seconds=SETTING_SECONDS,
        )
        return
    with tempfile.TemporaryDirectory(prefix="relax-memory-") as folder:
        model = given.model or make_model(Path(folder) / "model")
        if given.only is not None:
            row(model, SETTINGS[given.only])
            return
        rows = [row(model, setting) for setting in SETTINGS]
    ratios = sorted(float(one["planned / measured"]) for one in rows)
    report.write(
        "trainer-memory",
        title="Memory of a train step: planned and measured",
        question=QUESTION,
        command="python -m benchmarks.trainer_memory",
        rows=rows,
        conclusion=f"Planned over measured lies between {ratios[0]:.2f} and {ratios[-1]:.2f}.",
    )


if __name__ == "__main__":
    main()
