"""Samples as a trainer reads them, for benchmarks that need no run."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_events.events.parts import FinishReason, SampleKey
from relax_events.events.types import SampleReady


def ready_sample(
    tokens: NDArray[np.int32],
    *,
    num_prompt_tokens: int,
    samples_per_prompt: int,
    group_index: int = 0,
    sample_index: int = 0,
    **arrays: NDArray[Any] | None,
) -> SampleReady:
    """Return a sample of version 0; its reward is its index in the prompt group.

    Args:
        tokens: Prompt and completion.
        num_prompt_tokens: How many of them carry no loss.
        samples_per_prompt: Of its prompt group.
        group_index: Of its prompt group in the train batch.
        sample_index: In the prompt group.
        arrays: `rollout_logprobs` and `advantages`, and what else differs: `loss_mask`.
    """
    group_id = f"000000-{group_index:04d}-0"
    mask = (np.arange(len(tokens)) >= num_prompt_tokens).astype(np.uint8)
    content: dict[str, Any] = {"loss_mask": mask} | arrays
    return SampleReady(
        key=SampleKey(
            sample_id=f"{group_id}/{sample_index}",
            prompt_group_id=group_id,
            sample_index=sample_index,
            samples_per_prompt=samples_per_prompt,
            train_step=0,
            group_index=group_index,
            attempt=0,
            row=group_index,
            policy_version=0,
            min_policy_version=0,
            max_policy_version=0,
        ),
        tokens=tokens,
        reward=float(sample_index),
        temperature=1.0,
        num_prompt_tokens=num_prompt_tokens,
        finish_reason=FinishReason.STOP,
        **content,
    )


def random_sample(
    generator: np.random.Generator,
    num_tokens: int,
    *,
    vocab_size: int,
    num_prompt_tokens: int,
    logprob: float,
    sample_index: int,
    group_index: int = 0,
) -> SampleReady:
    """Return a sample of random tokens, one of two in its prompt group.

    Args:
        generator: Of the tokens.
        num_tokens: Of prompt and completion.
        vocab_size: Bound of token ids.
        num_prompt_tokens: How many of them carry no loss.
        logprob: Log-probability of each sampled token in the rollout.
        sample_index: In the prompt group: even ones have the advantage 1, odd ones -1.
        group_index: Of its prompt group in the train batch.
    """
    mask = np.arange(num_tokens) >= num_prompt_tokens
    return ready_sample(
        generator.integers(0, vocab_size, num_tokens).astype(np.int32),
        num_prompt_tokens=num_prompt_tokens,
        samples_per_prompt=2,
        group_index=group_index,
        sample_index=sample_index,
        rollout_logprobs=np.where(mask, logprob, 0).astype(np.float32),
        advantages=(mask * (1.0 - 2 * (sample_index % 2))).astype(np.float32),
    )
