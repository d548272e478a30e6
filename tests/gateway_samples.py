"""Samples of episodes as the trainer takes them, and its log-probabilities of them."""

from __future__ import annotations

import numpy as np

from relax_events.config import RunConfig
from relax_events.engines.protocol import GeneratedSample
from relax_events.events.types import SampleReady
from relax_events.media.library import MediaLibrary
from relax_events.training.backend.scoring import LogprobScorer
from tests.event_samples import sample_key


def to_ready(sample: GeneratedSample) -> SampleReady:
    """Return an episode's sample as the trainer takes it."""
    assert sample.prompt_tokens is not None
    assert sample.loss_mask is not None
    num_prompt = len(sample.prompt_tokens)
    media = [
        part.media
        for message in (*sample.prompt_messages, *sample.turns)
        for part in message.parts
        if part.media is not None
    ]
    tokens = np.concatenate([sample.prompt_tokens, sample.tokens])
    return SampleReady(
        key=sample_key(),
        tokens=tokens,
        loss_mask=np.concatenate([np.zeros(num_prompt, np.uint8), sample.loss_mask]),
        rollout_logprobs=np.concatenate([np.zeros(num_prompt, np.float32), sample.logprobs]),
        advantages=np.ones(len(tokens), np.float32),
        reward=0.0,
        temperature=1.0,
        num_prompt_tokens=num_prompt,
        finish_reason=sample.finish_reason,
        media=[] if sample.path_lengths else media,
        path_lengths=list(sample.path_lengths),
        path_media=[list(one) for one in sample.path_media],
    )


def digests_of(sample: GeneratedSample) -> list[list[bytes]]:
    """Return the digests of the media of each path."""
    ready = to_ready(sample)
    return [[one.digest for one in path] for path in ready.path_media or [ready.media]]


def require_equal_logprobs(config: RunConfig, sample: GeneratedSample) -> None:
    """Compare the trainer's log-probabilities of a sample with those of the engine."""
    scorer = LogprobScorer(
        config.model.path,
        model=config.model,
        threads=1,
        max_tokens=2000,
        library=MediaLibrary(config),
    )
    ready = to_ready(sample)
    (scores,) = scorer.score([ready])
    np.testing.assert_allclose(scores, ready.rollout_logprobs, rtol=0, atol=1e-4)
