"""The samples that are measured: as long as short, long and very long answers are."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.ready_samples import ready_sample
from relax_events.events.types import SampleReady

BYTES_PER_TOKEN = 13  # int32 token, uint8 mask, two float32
SAMPLES_PER_PROMPT = 8


def arrays(num_tokens: int, *, seed: int = 0) -> dict[str, NDArray[Any]]:
    """Return the arrays of a sample; random, so that nothing can compress them."""
    generator = np.random.default_rng(seed)
    return {
        "tokens": generator.integers(0, 150_000, num_tokens).astype(np.int32),
        "loss_mask": np.ones(num_tokens, np.uint8),
        "rollout_logprobs": generator.standard_normal(num_tokens).astype(np.float32),
        "advantages": generator.standard_normal(num_tokens).astype(np.float32),
    }


def sample(num_tokens: int) -> SampleReady:
    """Make the sample that all others are copies of."""
    content = arrays(num_tokens)
    pattern = ready_sample(
        content.pop("tokens"),
        num_prompt_tokens=100,
        samples_per_prompt=SAMPLES_PER_PROMPT,
        **content,
    )
    return dataclasses.replace(pattern, reward=1.0)


def copy_sample(pattern: SampleReady, row: int, ready_at: int) -> SampleReady:
    """Return the sample of a row, put at `ready_at` (microseconds since the epoch)."""
    group_index, sample_index = divmod(row, SAMPLES_PER_PROMPT)
    group_id = f"000000-{group_index:04d}-0"
    return dataclasses.replace(
        pattern,
        key=dataclasses.replace(
            pattern.key,
            sample_id=f"{group_id}/{sample_index}",
            prompt_group_id=group_id,
            sample_index=sample_index,
            group_index=group_index,
            row=row,
        ),
        ready_at=ready_at,
    )
