"""Builds the request that asks an engine for the samples of a prompt group."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from relax_events.config import RunConfig
from relax_events.engines.protocol import EnvironmentContext, GenerationRequest, SampleRequest
from relax_events.events.parts import VersionSegment
from relax_events.media.library import MediaLibrary
from relax_events.objects.roots import list_message_media
from relax_events.roles.inflight_group import InflightGroup


def build_generation_request(
    group: InflightGroup,
    *,
    config: RunConfig,
    policy_version: int,
    stop_token_ids: Sequence[int],
    library: MediaLibrary,
) -> GenerationRequest:
    """Build the request for the samples of a prompt group that are not generated yet.

    Args:
        group: The prompt group, with its media prefetched.
        config: The run.
        policy_version: The version that the engine serves.
        stop_token_ids: Tokens that end an answer.
        library: Loads the prompt's media.
    Raises:
        PoisonSample: A media item can't be loaded.
    """
    issued = group.issued
    finished = {sample.sample_id for sample in group.samples}
    indices = [
        index
        for index in range(issued.samples_per_prompt)
        if f"{issued.prompt_group_id}/{index}" not in finished
    ]
    return GenerationRequest(
        prompt_group_id=issued.prompt_group_id,
        prompt_tokens=group.prompt_tokens,
        samples=tuple(
            _build_sample_request(group, index, policy_version=policy_version) for index in indices
        ),
        sampling=config.engine.sampling,
        stop_token_ids=tuple(stop_token_ids),
        media=tuple(library.load(reference) for reference in list_message_media(issued.messages)),
        num_top_tokens=config.algorithm.num_rollout_top_tokens,
        environment_context=EnvironmentContext(
            messages=issued.messages,
            answer=issued.answer,
            metadata=issued.metadata,
            tools=issued.tools,
        ),
    )


def sample_seed(group_seed: int, sample_index: int) -> int:
    """Derive a sample's seed, so that every worker generates the same sample."""
    return int.from_bytes(
        hashlib.blake2b(f"{group_seed}/{sample_index}".encode(), digest_size=7).digest()
    )


def _build_sample_request(
    group: InflightGroup, index: int, *, policy_version: int
) -> SampleRequest:
    """Build the request for a sample: new, resumed from another worker's tokens, or with the
    dataset's completion, whose log-probabilities are 0 because no policy sampled it.
    """
    name, seed = (
        f"{group.issued.prompt_group_id}/{index}",
        sample_seed(group.issued.seed, index),
    )
    if (partial := group.partials.get(index)) is not None:
        return SampleRequest(
            sample_id=name,
            seed=seed,
            tokens=partial.tokens,
            logprobs=partial.logprobs,
            segments=partial.segments,
            top_tokens=partial.top_tokens,
            loss_mask=partial.loss_mask,
            turns=partial.turns,
            routed_experts=partial.routed_experts,
        )
    tokens = group.answers[index].tokens if group.answers else np.empty(0, np.int32)
    return SampleRequest(
        sample_id=name,
        seed=seed,
        tokens=tokens,
        logprobs=np.zeros(len(tokens), np.float32),
        segments=(VersionSegment(policy_version, len(tokens)),) if group.answers else (),
    )
