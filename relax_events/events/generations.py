"""Tells one generation of a prompt group from another: a prompt group whose lease lapsed may be
generated twice under the same ids.
"""

from __future__ import annotations

import dataclasses
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


def trajectory_of(event: SampleEvent) -> TrajectoryKey:
    """Return what an event about a sample is joined by."""
    key = event.key
    return key.sample_id, key.policy_version, key.generation_digest


def with_generation_digest(samples: Sequence[SampleRolledOut]) -> list[SampleRolledOut]:
    """Return the samples of a prompt group, all that one worker generated together, marked as one
    generation.

    The digest covers what scores, log-probabilities and advantages are computed from: tokens, loss
    masks, log-probabilities of the engine, version segments, paths, and media. The same work done
    twice with the same result counts as one generation.
    """
    digest = blake2b(digest_size=DIGEST_BYTES)
    for sample in sorted(samples, key=lambda sample: sample.key.sample_index):
        digest.update(
            repr(
                (
                    sample.sample_id,
                    sample.policy_version,
                    len(sample.tokens),
                    sample.version_segments,
                    *sample.path_lengths,
                )
            ).encode()
        )
        for name in ("tokens", "loss_mask", "rollout_logprobs"):
            array = dense(getattr(sample, name), what=f"sample {sample.sample_id}: {name}")
            digest.update(np.ascontiguousarray(array, array.dtype.newbyteorder("<")).data)
        said = (*sample.messages, *sample.turns) if sample.turns else ()
        for media in (
            *(part.media for turn in said for part in turn.parts if part.media is not None),
            *(media for path in sample.path_media for media in path),
        ):
            digest.update(media.digest)
    return [
        dataclasses.replace(
            sample,
            key=dataclasses.replace(sample.key, generation_digest=digest.hexdigest()),
        )
        for sample in samples
    ]
