"""Tells one generation of a prompt group from another: a prompt group whose lease lapsed may be
generated twice under the same ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from relax_events.events.parts import SampleEvent
from relax_events.events.tensors import dense
from relax_events.events.types import SampleRolledOut

DIGEST_BYTES = 16
TrajectoryKey = tuple[str, int, str]
"""Sample id, policy version of its slot, and digest of its generation: equal for all that was
computed from one trajectory."""


def get_trajectory_key(event: SampleEvent) -> TrajectoryKey:
    """Return what an event about a sample is joined by."""
    key = event.key
    return key.sample_id, key.policy_version, key.generation_digest


def mark_generation(samples: Sequence[SampleRolledOut]) -> None:
    """Mark new samples of a prompt group, all that one worker generated together, as one
    generation: sets `generation_digest` in their keys.

    The digest covers what scores, log-probabilities and advantages are computed from: tokens, loss
    masks, log-probabilities of the engine, version segments, paths, and media. The same work done
    twice with the same result counts as one generation.
    """
    ordered = sorted(samples, key=lambda sample: sample.key.sample_index)
    digest = blake2b(
        repr([_describe(sample) for sample in ordered]).encode(), digest_size=DIGEST_BYTES
    )
    for name in ("tokens", "loss_mask", "rollout_logprobs"):
        arrays = [
            dense(getattr(sample, name), what=f"sample {sample.sample_id}: {name}")
            for sample in ordered
        ]
        joined = np.concatenate(arrays)
        digest.update(joined.astype(joined.dtype.newbyteorder("<"), copy=False).data)
    generation_digest = digest.hexdigest()
    for sample in samples:
        object.__setattr__(sample.key, "generation_digest", generation_digest)


def _describe(sample: SampleRolledOut) -> tuple[object, ...]:
    """Return what the digest covers besides the arrays, which follow one after the other."""
    messages = (*sample.messages, *sample.turns) if sample.turns else ()
    return (
        sample.sample_id,
        sample.policy_version,
        len(sample.tokens),
        [
            (segment.policy_version, segment.num_tokens, segment.kept_cache)
            for segment in sample.version_segments
        ],
        sample.path_lengths,
        [part.media.digest for turn in messages for part in turn.parts if part.media is not None],
        [media.digest for path in sample.path_media for media in path],
    )
