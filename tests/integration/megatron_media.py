"""Samples about images, video and audio for the ranks of test_megatron, generated from a seed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from relax_events.config import MediaConfig, RunConfig
from relax_events.engines.protocol import GeneratedSample
from relax_events.events.parts import FinishReason, Modality
from relax_events.events.types import SampleReady
from relax_events.media.library import MediaLibrary
from tests.unit.image_model import prompt_of, ready, request_about
from tests.unit.trainer_samples import token_sets
from tests.unit.video_and_audio import OMNI, SMALL, item_of

MEDIA = MediaConfig(**SMALL)
FAMILIES = ("qwen3_vl", "deep_vl", "qwen3_vl_moe", OMNI)
SIZES: dict[Modality, Any] = {
    Modality.IMAGE: (64, 48),
    Modality.VIDEO: (32, 32, 4),
    Modality.AUDIO: 0.4,
}


def reads_media(model: Path) -> bool:
    """Return whether the model of a scenario reads media."""
    return model.name in FAMILIES


def with_media(config: RunConfig, folder: Path) -> RunConfig:
    """Return a config whose media are stored in a folder."""
    model = config.model.model_copy(update={"media": MEDIA})
    run = config.run.model_copy(update={"directory": folder})
    return config.model_copy(update={"model": model, "run": run})


def media_samples(config: RunConfig, num_samples: int, *, seed: int) -> list[SampleReady]:
    """Generate samples in prompt groups of two: about two files, about one, and about none."""
    path, library = config.model.path, MediaLibrary(config)
    modalities = list(SIZES) if path.name == OMNI else list(SIZES)[:2]
    samples = []
    for number in range(num_samples // 2):
        chosen = [modalities[(number + one) % len(modalities)] for one in range(number % 3)]
        references = [
            library.add(item_of(modality, SIZES[modality], seed=10 * seed + number))
            for modality in chosen
        ]
        media = tuple(library.load(reference) for reference in references)
        request = replace(request_about(0, ()), prompt_group_id=f"g{number}", media=media)
        request = replace(request, prompt_tokens=prompt_of(media, path=path, bounds=MEDIA))
        for index in range(2):
            generator = np.random.default_rng([seed, number, index])
            samples.append(_make_sample(generator, request, number, index))
    return samples


def _make_sample(
    generator: np.random.Generator, request: Any, number: int, index: int
) -> SampleReady:
    num_tokens = int(generator.integers(2, 7))
    generated = GeneratedSample(
        sample_id=f"s{2 * number + index}",
        prompt_group_id=request.prompt_group_id,
        tokens=generator.integers(0, 200, num_tokens).astype(np.int32),
        logprobs=(-5.5 + 0.2 * generator.standard_normal(num_tokens)).astype(np.float32),
        finish_reason=FinishReason.STOP,
        segments=(),
    )
    sample = ready(request, generated, index)
    mask, length = sample.loss_mask, len(np.asarray(sample.tokens))
    topk_ids, topk_logprobs = token_sets(generator, num_tokens)

    def near(scale: float) -> Any:
        noise = scale * generator.standard_normal(length)
        return np.where(mask, sample.rollout_logprobs + noise, 0).astype(np.float32)

    return replace(
        sample,
        key=replace(sample.key, policy_version=0, min_policy_version=0, max_policy_version=0),
        actor_logprobs=near(0.2),
        ref_logprobs=near(0.5),
        teacher_logprobs=near(0.4),
        topk_ids=topk_ids,
        topk_teacher_logprobs=topk_logprobs,
        advantages=(np.asarray(mask) * generator.standard_normal()).astype(np.float32),
    )
