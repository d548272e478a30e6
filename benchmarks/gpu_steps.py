"""Train steps, versions and moves of memory on one GPU, at the published shapes of Qwen3-0.6B and Qwen3-4B.

`python -m benchmarks.gpu_steps` starts a process for each setting, one after the other.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import report
from benchmarks.ready_samples import random_sample
from benchmarks.trainer_memory import LOGPROB, SHAPE, make_model
from benchmarks.version_price_side import measured
from relax_events.config import RunConfig
from relax_events.events.types import SampleReady
from relax_events.models.checkpoint_facts import read_facts
from relax_events.objects import ObjectStore
from relax_events.planning.megatron_memory import memory_of_trainer
from relax_events.training.backend import policy_model
from relax_events.training.backend.factory import find_backend
from relax_events.training.backend.weight_stream import weight_parts
from relax_events.training.ranks import SingleRank
from relax_events.weights.file_content import lay_out
from relax_events.weights.transport import StorePublisher

SHAPES: dict[str, dict[str, Any]] = {
    "0.6B": SHAPE,
    "4B": SHAPE
    | {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
    },
}
"""Of the `config.json` that Qwen publishes with each model."""
PROMPT_TOKENS = 512
NUM_STEPS, MICRO_BATCHES = 3, 2
SETTING_SECONDS = 120.0
QUESTION = """Train steps on one GPU, in bfloat16 with float32 masters, on models with random weights in the published shapes of Qwen3.
A step is two micro-batches, forward and backward, and AdamW; a micro-batch holds whole samples of the length that is shown, each with a prompt of 512
tokens. Median of the last two of three steps. *Useful* is 6 operations for each parameter and token, without attention and without what is computed
again, as a share of the 989 TFLOP/s of the data sheet. *Planned* is what `relax plan` computes for the trainer without what the process itself takes;
*measured* is the most memory that tensors had at a time. *Rows with a mask* computes samples of unequal lengths as on a CPU: in rows as long as the
longest, with a mask where several share one."""
PRICE = """What a version and a turn cost with the 4B model: a version of 8.04 GB is published to a store on the machine's disk; then the trainer leaves the
GPU to others (`devices.time_share`), comes back and leaves again."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A way to train: model, tokens of a sample and of a micro-batch."""

    model: str
    sample_tokens: int
    row_tokens: int
    recomputed: str = "none"
    offloaded: bool = False
    backend: str = "torch"
    publishes: bool = False
    is_uneven: bool = False
    is_masked: bool = False

    @property
    def name(self) -> str:
        """Text of the table's row."""
        parts = [self.model]
        parts += [f"recompute {self.recomputed}"] if self.recomputed != "none" else []
        parts += ["optimizer on the host"] if self.offloaded else []
        parts += [self.backend] if self.backend != "torch" else []
        parts += ["rows with a mask"] if self.is_masked else []
        return ", ".join(parts)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of the samples of a micro-batch."""
        if self.is_uneven:
            return UNEVEN
        return (self.sample_tokens,) * (self.row_tokens // self.sample_tokens)


UNEVEN = (12_288, 6144, 4096, 3072, 2048, 1536, 1024, 1024, 768, 768)
SETTINGS = (
    Setting("0.6B", 2048, 16_384, "whole"),
    Setting("0.6B", 2048, 16_384, "whole", backend="megatron"),
    Setting("4B", 12_288, 32_768, "whole", is_uneven=True),
    Setting("4B", 12_288, 32_768, "whole", is_uneven=True, is_masked=True),
    Setting("4B", 20_000, 20_000, "whole"),
    Setting("4B", 2048, 16_384, "whole", publishes=True),
    Setting("4B", 2048, 8192),
    Setting("0.6B", 2048, 16_384),
    Setting("4B", 2048, 16_384, "whole", offloaded=True),
)


def run_config(model: Path, setting: Setting) -> RunConfig:
    """Return the run file of a setting."""
    return RunConfig.model_validate(
        {
            "run": {"id": "gpu-steps", "directory": model.parent / "run"},
            "model": {"path": model, "dtype": "bfloat16", "device": "cuda"},
            "data": {"source": "jsonl:unused"},
            "algorithm": {"old_logprobs": "rollout"},
            "engine": {"sampling": {"max_new_tokens": setting.sample_tokens}},
            "trainer": {
                "learning_rate": 1e-6,
                "max_tokens_per_micro_batch": setting.row_tokens,
                "activation_checkpointing": setting.recomputed,
                "offload_optimizer": setting.offloaded,
                "backend": setting.backend,
            },
        }
    )


def make_samples(setting: Setting, first: int) -> list[SampleReady]:
    """Draw the samples of a micro-batch."""
    return [
        random_sample(
            np.random.default_rng(index),
            length,
            vocab_size=SHAPE["vocab_size"],
            num_prompt_tokens=PROMPT_TOKENS,
            logprob=LOGPROB,
            group_index=index // 2,
            sample_index=index % 2,
        )
        for index, length in enumerate(setting.lengths, first)
    ]


def timed(work: Callable[[], object]) -> float:
    """Return the seconds that work on the GPU takes."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def train(model: Path, setting: Setting) -> dict[str, float]:
    """Train in this process; return seconds and bytes."""
    if setting.is_masked:
        policy_model.MIN_LONG_ROW = 10**9
    began = time.perf_counter()
    backend = find_backend(run_config(model, setting).trainer)(
        run_config(model, setting), ranks=SingleRank()
    )
    torch.cuda.synchronize()
    found = {"load": time.perf_counter() - began}
    passes, updates = [], []
    for step in range(NUM_STEPS):
        for number in range(MICRO_BATCHES):
            samples = make_samples(setting, 1000 * (MICRO_BATCHES * step + number))
            passes.append(timed(lambda samples=samples: backend.accumulate(samples)))
        updates.append(timed(backend.step))
    found["allocated"] = torch.cuda.max_memory_allocated()
    passes = [sum(passes[at : at + MICRO_BATCHES]) for at in range(0, len(passes), MICRO_BATCHES)]
    found["seconds"] = float(np.median([a + b for a, b in zip(passes, updates, strict=True)][1:]))
    found["update"] = float(np.median(updates[1:]))
    if setting.publishes:
        found |= publish(backend, model.parent / "objects")
        moved: list[int] = []
        found["away"] = timed(lambda: moved.append(backend.move_away()))
        found["back"] = timed(backend.bring_back)
        found["away again"] = timed(backend.move_away)
        found["moved"] = moved[0]
    return found


def publish(backend: Any, store: Path) -> dict[str, float]:
    """Publish two versions as the trainer does by default; measure the second."""
    publisher = StorePublisher(ObjectStore.open(store.as_uri()))
    for version in range(2):
        snapshot = timed(lambda: list(lay_out(weight_parts(backend))))
        files = lay_out(weight_parts(backend), keep=publisher.keeps_files)
        price, (artifact, _) = measured(
            lambda files=files, version=version: publisher.publish(files, policy_version=version)
        )
    return {
        "snapshot": snapshot,
        "published": price["seconds"],
        "processor": price["user"] + price["system"],
        "version bytes": artifact.num_bytes,
        "host bytes": price["bytes"],
    }


def row(model: Path, setting: Setting) -> tuple[dict[str, Any], dict[str, float]]:
    """Measure a setting in a process of its own; return its row and all numbers, empty where it
    failed.
    """
    command = [sys.executable, "-m", "benchmarks.gpu_steps", "--model", str(model)]
    try:
        ended = subprocess.run(
            [*command, "--setting", str(SETTINGS.index(setting))],
            stdout=subprocess.PIPE,
            text=True,
            timeout=SETTING_SECONDS,
            check=True,
        )
    except subprocess.SubprocessError as error:
        print(f"{setting.name}: {error}", file=sys.stderr, flush=True)
        return {}, {}
    found = json.loads(ended.stdout.splitlines()[-1])
    facts = read_facts(model)
    parts = memory_of_trainer(run_config(model, setting), facts, on_gpu=True)
    planned = parts.parts(setting.row_tokens).parts
    line = row_of(
        setting,
        found,
        num_parameters=facts.num_parameters,
        planned=sum(size for name, size in planned.items() if name != "process"),
    )
    print(json.dumps(line | {"all": found}), file=sys.stderr, flush=True)
    return line, found


def row_of(
    setting: Setting, found: dict[str, float], *, num_parameters: int, planned: float
) -> dict[str, Any]:
    """Return the row of a setting."""
    rate = MICRO_BATCHES * sum(setting.lengths) / found["seconds"]
    return {
        "setting": setting.name,
        "tokens of a sample": ("768 to " if setting.is_uneven else "")
        + f"{setting.sample_tokens:,}",
        "of a micro-batch": f"{setting.row_tokens:,}",
        "tokens/s": f"{rate:,.0f}",
        "useful": f"{6 * num_parameters * rate / 989e12:.2f}",
        "update, s": f"{found['update']:.2f}",
        "planned, GB": f"{planned / 1e9:.1f}",
        "measured, GB": f"{found['allocated'] / 1e9:.1f}",
        "planned / measured": f"{planned / found['allocated']:.2f}",
    }


def price_rows(found: dict[str, float], num_bytes: float) -> list[dict[str, Any]]:
    """Return the rows of a version and a turn."""
    return [
        {"what": "publish a version", "seconds": f"{found['published']:.1f}"},
        {
            "what": "of it the trainer's processor time",
            "seconds": f"{found['processor']:.1f}, {found['processor'] / num_bytes * 1e9:.2f} a GB",
        },
        {
            "what": f"leave the GPU with {found['moved'] / 1e9:.0f} GB, the first time",
            "seconds": f"{found['away']:.1f}",
        },
        {"what": "come back", "seconds": f"{found['back']:.1f}"},
        {"what": "leave again", "seconds": f"{found['away again']:.1f}"},
    ]


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description="Train steps on one GPU.")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--make", choices=SHAPES, help="write this model in this process")
    parser.add_argument("--setting", type=int, help="train this one in this process")
    given = parser.parse_args()
    if given.make is not None:
        make_model(given.model, shape=SHAPES[given.make], device="cuda")
        return
    if given.setting is not None:
        print(json.dumps(train(given.model, SETTINGS[given.setting])))
        return
    with tempfile.TemporaryDirectory(prefix="relax-gpu-") as folder:
        models = {shape: Path(folder) / shape / "model" for shape in SHAPES}
        for shape, model in models.items():  # in a process of its own, which keeps no memory
            command = [sys.executable, "-m", "benchmarks.gpu_steps", "--model", str(model)]
            subprocess.run([*command, "--make", shape], timeout=SETTING_SECONDS, check=True)
        measured_rows = [row(models[setting.model], setting) for setting in SETTINGS]
        size = sum(file.stat().st_size for file in models["4B"].glob("*.safetensors"))
    prices = [found for _, found in measured_rows if "published" in found]
    report.write(
        "gpu-steps",
        title="Train steps on one GPU",
        question=f"{QUESTION}\n\n{PRICE}",
        command="python -m benchmarks.gpu_steps",
        tables={
            "Train steps": [line for line, _ in measured_rows if line],
            "A version and a turn": [line for found in prices for line in price_rows(found, size)],
        },
        conclusion=f"{torch.cuda.get_device_name()}, torch {torch.__version__}.",
    )


if __name__ == "__main__":
    main()
