"""Tells one generation of a prompt group from another: a prompt group whose lease lapsed may be
generated twice under the same ids. Its digest also proves what was generated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import NamedTuple

import numpy as np

from relax_events.events.parts import Array, MediaRef, SampleEvent, StoredArray
from relax_events.events.types import SampleReady, SampleRolledOut

DIGEST_BYTES = 16
DIGEST_FORM = "v2-"
"""Begins a generation digest that can be computed again from the samples' records."""
TrajectoryKey = tuple[str, int, str]
"""Sample id, policy version of its slot, and digest of its generation: equal for all that was
computed from one trajectory."""


class Trajectory(NamedTuple):
    """Digests of what was generated of a sample, 16 bytes each: of its tokens, and of the rest."""

    tokens: bytes
    rest: bytes


def get_trajectory_key(event: SampleEvent) -> TrajectoryKey:
    """Return what an event about a sample is joined by."""
    key = event.key
    return key.sample_id, key.policy_version, key.generation_digest


def describe_trajectory(
    sample: SampleRolledOut | SampleReady, *, has_segments: bool = True
) -> Trajectory:
    """Compute the digests of a sample, equal for a rolled-out sample and for the ready one made of
    it, wherever their arrays are.

    The rest covers the sample's index, finish reason, prompt length and temperature, its version
    segments, its paths and which were truncated, its media, the loss mask, the engine's
    log-probabilities and the routed experts. Left out: `topk_ids`, which a teacher may replace, and
    texts.

    Args:
        sample: Its arrays need not be fetched from the object store.
        has_segments: Whether version segments are covered. Ready samples of a run whose data bring
            the completions have none.
    """
    segments = sample.version_segments if has_segments else []
    num_prompt_media = 0 if sample.path_lengths else len(sample.prompt_media)
    rest = sha256(
        repr(
            (
                sample.key.sample_index,
                str(sample.finish_reason),
                sample.num_prompt_tokens,
                float(sample.temperature),
                [(part.policy_version, part.num_tokens, part.kept_cache) for part in segments],
                sample.path_lengths,
                num_prompt_media,
                [media.digest for media in _list_media(sample)],
                [[media.digest for media in path] for path in sample.path_media],
                *([sample.truncated_paths] if sample.truncated_paths else []),
            )
        ).encode()
    )
    for array in (sample.loss_mask, sample.rollout_logprobs, sample.routed_experts):
        rest.update(_describe_array(array))
    tokens = sha256(_describe_array(sample.tokens))
    return Trajectory(tokens.digest()[:DIGEST_BYTES], rest.digest()[:DIGEST_BYTES])


def digest_generation(
    trajectories: Iterable[tuple[int, Trajectory]], *, prompt_group_id: str, policy_version: int
) -> str:
    """Compute the digest of a generation from those of its samples, which need not be all of the
    prompt group.

    Args:
        trajectories: Each with the sample's index, in any order.
        prompt_group_id: Id of the prompt group.
        policy_version: Version that owns its slot.
    Returns:
        "v2-" and 32 hexadecimal digits.
    """
    digest = sha256(f"{prompt_group_id}@{policy_version}".encode())
    for index, trajectory in sorted(trajectories):
        digest.update(index.to_bytes(4, "little") + trajectory.tokens + trajectory.rest)
    return DIGEST_FORM + digest.digest()[:DIGEST_BYTES].hex()


def mark_generation(samples: Sequence[SampleRolledOut]) -> None:
    """Mark new samples of a prompt group, all that one worker generated together, as one
    generation: sets `generation_digest` in their keys.

    The same work done twice with the same result counts as one generation.
    """
    key = samples[0].key
    generation_digest = digest_generation(
        ((sample.key.sample_index, describe_trajectory(sample)) for sample in samples),
        prompt_group_id=key.prompt_group_id,
        policy_version=key.policy_version,
    )
    for sample in samples:
        object.__setattr__(sample.key, "generation_digest", generation_digest)


def compute_array_digest(array: Array) -> bytes:
    """Return the SHA-256 of an array's values, which is also its address in the object store."""
    return (
        array.reference.digest
        if isinstance(array, StoredArray)
        else sha256(array.tobytes()).digest()
    )


def _describe_array(array: Array | None) -> bytes:
    """Return type, shape and digest of an array; one byte for none."""
    if array is None:
        return b"-"
    dtype = array.dtype if isinstance(array, StoredArray) else array.dtype.str
    return f"{dtype}{tuple(array.shape)}".encode() + compute_array_digest(array)


def describe_differences(
    generated: SampleRolledOut, ready: SampleReady, *, has_segments: bool = True
) -> str:
    """Return the fields in which a ready sample differs from the generated one, each with both
    values, of an array the first that differs; empty where `describe_trajectory` is the same.

    Args:
        generated: The rolled-out sample, its arrays fetched.
        ready: The ready one, likewise.
        has_segments: Whether version segments are compared.
    """
    names = ("finish_reason", "num_prompt_tokens", "temperature", "path_lengths", "truncated_paths")
    pairs = [(name, getattr(generated, name), getattr(ready, name)) for name in names]
    if has_segments:
        pairs.append(("version_segments", generated.version_segments, ready.version_segments))
    was_media, media = (
        [
            [file.digest.hex()[:16] for file in files]
            for files in (_list_media(one), *one.path_media)
        ]
        for one in (generated, ready)
    )
    pairs.append(("media", was_media, media))
    differences = [f"{name} was {was}, is {now}" for name, was, now in pairs if was != now]
    for name in ("tokens", "loss_mask", "rollout_logprobs", "routed_experts"):
        was, now = getattr(generated, name), getattr(ready, name)
        if _describe_array(was) != _describe_array(now):
            differences.append(_describe_array_difference(name, was, now))
    return "; ".join(differences)


def _describe_array_difference(name: str, was: Array | None, now: Array | None) -> str:
    if not (isinstance(was, np.ndarray) and isinstance(now, np.ndarray)):
        return f"{name} differs"
    if (was.shape, was.dtype) != (now.shape, now.dtype):
        return f"{name} was {was.dtype}{list(was.shape)}, is {now.dtype}{list(now.shape)}"
    places = np.argwhere(was != now).tolist()
    if not places:
        return f"{name} differs in the sign of a zero"
    at = tuple(places[0])
    where = f"{name}{list(at)} was {was[at]}, is {now[at]}"
    return f"{where} ({len(places)} values differ)" if len(places) > 1 else where


def _list_media(sample: SampleRolledOut | SampleReady) -> Sequence[MediaRef]:
    """Return the media of a sample of one path; those of several are in `path_media`."""
    if sample.path_lengths:
        return ()
    if isinstance(sample, SampleReady):
        return sample.media
    parts = (part for message in (*sample.messages, *sample.turns) for part in message.parts)
    return [part.media for part in parts if part.media is not None]
