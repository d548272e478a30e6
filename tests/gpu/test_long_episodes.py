"""An episode of 40 paths is trained in passes on a device that is too small for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from relax_events.errors import OutOfMemory
from relax_events.events.types import SampleReady
from relax_events.packages.examples.tiny_models import make_tiny
from relax_events.training.backend.torch_backend import TorchBackend
from relax_events.training.ranks import SingleRank
from tests.event_samples import changed, ready
from tests.unit.trainer_samples import run_config

DEVICE, DEVICE_BYTES = "cuda", 24 * 10**9
WIDTH, LAYERS, VOCABULARY = 1024, 4, 151_936
NUM_PATHS, PATH_TOKENS, SHARED_TOKENS = 40, 16_000, 2_000
BUDGET = 16_384


@pytest.fixture(autouse=True)
def small_device(one_gpu: None) -> Iterator[None]:
    """Give this process 24 GB of the GPU."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, DEVICE_BYTES / total))
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model of few layers with the vocabulary of Qwen3."""
    path = make_tiny(tmp_path_factory.mktemp("long") / "model", corpus=["12=21"], seed=3)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=3 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=4 * PATH_TOKENS,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    torch.manual_seed(3)
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    return path


def make_episode() -> SampleReady:
    """Return an episode whose paths begin with the same tokens, and sample all others."""
    generator = np.random.default_rng(7)
    rows = generator.integers(0, VOCABULARY, (NUM_PATHS, PATH_TOKENS)).astype(np.int32)
    rows[:, :SHARED_TOKENS] = rows[0, :SHARED_TOKENS]
    mask = np.zeros(rows.shape, np.uint8)
    mask[:, SHARED_TOKENS:] = 1
    uniform = np.where(mask, -np.log(VOCABULARY), 0).astype(np.float32)
    return changed(
        ready("000000-0000-0", 0, of=1),
        tokens=rows.ravel(),
        loss_mask=mask.ravel(),
        rollout_logprobs=uniform.ravel(),
        advantages=mask.ravel().astype(np.float32),
        num_prompt_tokens=SHARED_TOKENS,
        path_lengths=[PATH_TOKENS] * NUM_PATHS,
        version_segments=[],
    )


def open_backend(path: Path, *, max_tokens: int) -> TorchBackend:
    """Return a trainer whose passes have so many tokens at most."""
    trainer = {"max_tokens_per_micro_batch": max_tokens, "activation_checkpointing": "none"}
    algorithm = {"old_logprobs": "rollout", "kl_coefficient": 0.0}
    config = run_config(path, algorithm=algorithm, trainer=trainer, dtype="bfloat16")
    model = config.model.model_copy(update={"device": DEVICE})
    return TorchBackend(config.model_copy(update={"model": model}), ranks=SingleRank())


def test_episode_is_trained_in_passes(wide_model: Path) -> None:
    backend = open_backend(wide_model, max_tokens=BUDGET)
    backend.accumulate([make_episode()])
    metrics = backend.step().to_metrics()
    assert np.isfinite(metrics["grad_norm"])
    assert metrics["grad_norm"] > 0
    assert torch.cuda.max_memory_reserved() <= DEVICE_BYTES


def test_episode_does_not_fit_in_one_pass(wide_model: Path) -> None:
    backend = open_backend(wide_model, max_tokens=NUM_PATHS * PATH_TOKENS)
    with pytest.raises(OutOfMemory, match=r"trainer\.max_tokens_per_micro_batch") as error:
        backend.accumulate([make_episode()])
    assert error.value.num_paths == NUM_PATHS
    backend.discard()
    backend.max_cells = BUDGET  # as the trainer does, by halves
    backend.accumulate([make_episode()])
    assert backend.step().to_metrics()["grad_norm"] > 0
