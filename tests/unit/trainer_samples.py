"""A tiny model, run configs and samples for the trainer's tests."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from small_settings import small_run
from torch import Tensor
from transformers import AutoModelForCausalLM

from relax_events.config import RunConfig
from relax_events.events.parts import FinishReason, SampleKey
from relax_events.events.routed_experts import ExpertShape
from relax_events.events.types import SampleReady
from relax_events.packages.examples.tiny_models import make_tiny
from tests.event_samples import changed
from tests.folders import kept_folder


@cache
def tiny_model() -> Path:
    """Write a tiny random Qwen3 once in a test process, and delete it at its end."""
    return make_tiny(kept_folder("tiny"), corpus=["12=21"], hidden_size=32, seed=3)


def run_config(
    path: Path | None = None,
    *,
    algorithm: dict[str, Any] | None = None,
    trainer: dict[str, Any] | None = None,
    data: dict[str, Any] | None = None,
    dtype: str = "float32",
) -> RunConfig:
    """Make a config of a run on the CPU."""
    return small_run(
        {
            "run": {"id": "test"},
            "model": {"path": path or tiny_model(), "device": "cpu", "dtype": dtype},
            "data": {"source": "jsonl:unused"} | (data or {}),
            "algorithm": algorithm or {},
            "teacher": {"model_path": tiny_model()},
            "trainer": {"learning_rate": 1e-2} | (trainer or {}),
        }
    )


def make_samples(
    num_samples: int, *, seed: int = 0, temperature: float = 1.0, model_path: Path | None = None
) -> list[SampleReady]:
    """Generate samples of 4 to 20 tokens, with masks that have holes, near a model's own
    log-probabilities (the tiny one's by default)."""
    generator, model = np.random.default_rng(seed), plain_model(model_path or tiny_model())
    return [_make_sample(generator, model, index, temperature) for index in range(num_samples)]


def route_by_tokens(sample: SampleReady, shape: ExpertShape) -> SampleReady:
    """Return a sample whose experts depend on its tokens and the layer alone, not on a router."""
    tokens = np.asarray(sample.tokens)
    token = tokens[:-1, None, None] + np.arange(shape.num_layers)[:, None]
    half = shape.num_experts // 2
    experts = np.concatenate([token % half, half + token % half], 2)
    return changed(sample, routed_experts=shape.compact(experts))


def _make_sample(
    generator: np.random.Generator, model: torch.nn.Module, index: int, temperature: float
) -> SampleReady:
    num_tokens = int(generator.integers(4, 21))
    num_prompt_tokens = int(generator.integers(1, num_tokens - 1))
    mask = (np.arange(num_tokens) >= num_prompt_tokens).astype(np.uint8)
    mask[num_prompt_tokens + 1 :] &= generator.random(num_tokens - num_prompt_tokens - 1) < 0.8
    tokens = generator.integers(0, 256, num_tokens).astype(np.int32)
    logprobs = np.where(mask, plain_logprobs(tokens, temperature, model), 0).astype(np.float32)

    def near(scale: float) -> np.ndarray[Any, np.dtype[np.float32]]:
        return np.where(mask, logprobs + scale * generator.standard_normal(num_tokens), 0).astype(
            np.float32
        )

    teacher = np.random.default_rng(
        1000 + index
    )  # of its own, so that the other arrays are what they were before samples had a teacher
    topk_ids, topk_teacher_logprobs = token_sets(teacher, int(mask.sum()))
    return SampleReady(
        key=SampleKey(
            sample_id=f"s{index}",
            prompt_group_id=f"g{index // 2}",
            sample_index=index % 2,
            samples_per_prompt=2,
            train_step=0,
            group_index=index // 2,
            attempt=0,
            row=index // 2,
            policy_version=0,
            min_policy_version=0,
            max_policy_version=0,
        ),
        tokens=tokens,
        loss_mask=mask,
        rollout_logprobs=near(0.3),
        actor_logprobs=near(0.2),
        ref_logprobs=near(0.5),
        teacher_logprobs=np.where(
            mask, logprobs + 0.4 * teacher.standard_normal(num_tokens), 0
        ).astype(np.float32),
        topk_ids=topk_ids,
        topk_teacher_logprobs=topk_teacher_logprobs,
        advantages=(mask * generator.standard_normal()).astype(np.float32),
        reward=1.0,
        temperature=temperature,
        num_prompt_tokens=num_prompt_tokens,
        finish_reason=FinishReason.STOP,
    )


def token_sets(
    generator: np.random.Generator, num_loss_tokens: int, num_ids: int = 6
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Draw the distribution of a teacher at each loss token, and take its most probable ids with
    their log-probabilities."""
    logits = 2 * generator.standard_normal((num_loss_tokens, 256))
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    ids = np.argsort(-logprobs, axis=-1)[:, :num_ids]
    return ids.astype(np.int32), np.take_along_axis(logprobs, ids, -1).astype(np.float32)


@cache
def plain_model(path: Path) -> torch.nn.Module:
    """Load a model in float64 without any code of the trainer's; callers must not change it."""
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    return model.eval()


def plain_logprobs(
    tokens: np.ndarray[Any, Any], temperature: float = 1.0, model: torch.nn.Module | None = None
) -> np.ndarray[Any, Any]:
    """Compute each token's log-probability from a whole forward of one sequence; 0 at the first
    token."""
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    with torch.no_grad():
        logits: Tensor = (model or plain_model(tiny_model()))(ids).logits[0] / temperature
    picked = logits[:-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    return np.concatenate([[0.0], picked.numpy()])
