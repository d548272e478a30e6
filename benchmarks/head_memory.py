"""Log-probabilities of many tokens over a large vocabulary: time and peak memory of one way, in a
process of its own.

`python -m benchmarks.head_memory MODEL` makes the model that `python -m benchmarks.head_memory
MODEL SIDE NUM_TOKENS` measures; in TRL's environment. The latter prints JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from relax_events.config import ModelConfig
from relax_events.training.backend.policy_model import PolicyModel
from relax_events.training.batch.packing import pack

VOCAB_SIZE, HIDDEN_SIZE, ROW_TOKENS = 151_936, 64, 512
FORWARD, BACKWARD = "forward", "forward and backward"
WARM_TOKENS = 512
CLEAR_PEAK = "5"


@dataclass(frozen=True, slots=True)
class Row:
    """A sample whose tokens are all trained but the first."""

    sample_id: str
    tokens: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    temperature: float = 1.0
    prompt_group_id: str = ""
    num_prompt_tokens: int = 1
    path_lengths: tuple[int, ...] = ()


def make_model(folder: Path, *, vocab_size: int = VOCAB_SIZE) -> Path:
    """Write a model of one small layer and a large head."""
    heads = HIDDEN_SIZE // 16
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=vocab_size,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=HIDDEN_SIZE,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=16,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def token_rows(num_tokens: int, *, vocab_size: int = VOCAB_SIZE) -> NDArray[np.int32]:
    """Draw rows with so many trained tokens in all, and one before them each."""
    rows = max(1, num_tokens // ROW_TOKENS)
    sampled: NDArray[np.int32] = (
        np.random.default_rng(0)
        .integers(0, vocab_size, (rows, num_tokens // rows + 1))
        .astype(np.int32)
    )
    return sampled


def ours(model: PolicyModel, tokens: NDArray[np.int32]) -> Tensor:
    """As the trainer does, with entropies."""
    mask = np.ones(tokens.shape[1], np.uint8)
    mask[0] = 0
    batch = pack(
        [Row(str(number), row, mask) for number, row in enumerate(tokens)],
        vocab_size=model.vocab_size,
    )
    logprobs: Tensor = model.token_logprobs(batch).logprobs
    return logprobs


def full(model: PolicyModel, tokens: NDArray[np.int32]) -> Tensor:
    """By a log-softmax over all logits, without entropies."""
    ids = torch.from_numpy(tokens).long()
    logprobs = model.module(input_ids=ids, use_cache=False).logits[:, :-1].log_softmax(-1)
    chosen: Tensor = logprobs.gather(-1, ids[:, 1:, None])
    return chosen.flatten()


def fused(model: PolicyModel, tokens: NDArray[np.int32]) -> Tensor:
    """By the head that TRL puts on a model, with entropies, as its trainer does."""
    ids = torch.from_numpy(tokens).long()
    logprobs: Tensor = model.module(
        input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids, fused_lm_head=True
    ).log_probs
    return logprobs.flatten()


SIDES: dict[str, Callable[[PolicyModel, NDArray[np.int32]], Tensor]] = {
    "full log-softmax": full,
    "TRL": fused,
    "ours": ours,
}


def opened(folder: Path, side: str) -> PolicyModel:
    """Load the model, with TRL's head where that is measured."""
    model = PolicyModel(
        folder,
        config=ModelConfig(dtype="float32", path=folder, device="cpu"),
        device=torch.device("cpu"),
    )
    if side == "TRL":
        from trl.trainer.utils import add_fused_lm_head  # the only side that needs TRL

        add_fused_lm_head(model.module, outputs=("log_probs", "entropy"))
    return model


def peak_bytes() -> int:
    """Return the most memory that was resident since the peak was cleared."""
    line = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmHWM")
    )
    return int(line.split()[1]) * 1024


def measured(call: Callable[[], None]) -> dict[str, float]:
    """Return the seconds of a call, and the bytes by which memory rose at most."""
    before = psutil.Process().memory_info().rss
    Path("/proc/self/clear_refs").write_text(CLEAR_PEAK)
    started = time.perf_counter()
    call()
    return {"seconds": time.perf_counter() - started, "bytes": max(peak_bytes() - before, 0)}


def measure(folder: Path, side: str, num_tokens: int) -> dict[str, dict[str, float]]:
    """Measure a side without and with gradients, after a small call that warms it."""
    model, way = opened(folder, side), SIDES[side]

    def forward(number: int) -> None:
        with torch.no_grad():
            way(model, token_rows(number))

    def backward(number: int) -> None:
        torch.autograd.backward(way(model, token_rows(number)).sum())

    forward(WARM_TOKENS)
    backward(WARM_TOKENS)
    return {
        FORWARD: measured(lambda: forward(num_tokens)),
        BACKWARD: measured(lambda: backward(num_tokens)),
    }


if __name__ == "__main__":
    if sys.argv[2:]:
        print(json.dumps(measure(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))))
    else:
        make_model(Path(sys.argv[1]))
