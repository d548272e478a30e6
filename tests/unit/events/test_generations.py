"""Two generations of a prompt group are distinguished by the contents of their samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from event_samples import changed, rolled_out

from relax_events.events.generations import get_trajectory_key, mark_generation
from relax_events.events.parts import ChatMessage, ContentPart, MediaRef, Modality, VersionSegment
from relax_events.events.types import SampleRolledOut

TURN = ChatMessage(
    "user",
    [
        ContentPart(
            Modality.IMAGE, None, MediaRef("file:///objects/a.png", b"a" * 32, "image/png", 3)
        )
    ],
)


def generation(**changes: Any) -> list[SampleRolledOut]:
    """Make a prompt group of two samples, and change the second."""
    return [rolled_out(index=0), changed(rolled_out(index=1), **changes)]


def digest_of(samples: list[SampleRolledOut]) -> str:
    mark_generation(samples)
    assert len({sample.key.generation_digest for sample in samples}) == 1
    return samples[0].key.generation_digest


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": np.array([5, 6, 7, 9], np.int32)},
        {"loss_mask": np.array([0, 0, 0, 1], np.uint8)},
        {"rollout_logprobs": np.array([0, 0, -0.5, -0.26], np.float32)},
        {"version_segments": [VersionSegment(0, 1), VersionSegment(1, 1)]},
        {"turns": [TURN]},
    ],
    ids=["tokens", "loss_mask", "rollout_logprobs", "version_segments", "media"],
)
def test_different_trajectory_has_a_different_generation_digest(changes: dict[str, Any]) -> None:
    assert digest_of(generation(**changes)) != digest_of(generation())


def test_identical_trajectories_share_one_generation_digest() -> None:
    again = generation(worker_id="rollout-1", rolled_out_at=2)
    assert digest_of(again) == digest_of(generation()[::-1]) == digest_of(generation())
    assert len(digest_of(again)) == 32


def test_trajectory_is_named_by_sample_version_and_generation() -> None:
    samples = generation()
    mark_generation(samples)
    sample = samples[1]
    assert get_trajectory_key(sample) == ("000000-0000-0/1", 0, sample.key.generation_digest)
