"""Two generations of a prompt group are distinguished by the contents of their samples."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from event_samples import changed, rolled_out

from relax_events.events.generations import get_trajectory_key, mark_generation
from relax_events.events.parts import (
    ChatMessage,
    ContentPart,
    FinishReason,
    MediaRef,
    Modality,
    VersionSegment,
)
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
        {"temperature": 0.9},
        {"loss_mask": np.array([0, 0, 1, 1], np.int8)},
        {"finish_reason": FinishReason.LENGTH},
        {"num_prompt_tokens": 1},
        {"path_lengths": [2, 2]},
        {"truncated_paths": [0]},
        {"routed_experts": np.zeros((3, 1, 1), np.uint8)},
    ],
    ids=[
        *("tokens", "loss_mask", "rollout_logprobs", "version_segments", "media", "temperature"),
        *("type of loss_mask", "finish_reason", "prompt", "paths", "truncated paths", "experts"),
    ],
)
def test_different_trajectory_has_a_different_generation_digest(changes: dict[str, Any]) -> None:
    assert digest_of(generation(**changes)) != digest_of(generation())


def test_identical_trajectories_share_one_generation_digest() -> None:
    again = generation(worker_id="rollout-1", rolled_out_at=2, error="61 s")
    assert digest_of(again) == digest_of(generation()[::-1]) == digest_of(generation())
    assert re.fullmatch("v2-[0-9a-f]{32}", digest_of(again))


def test_digest_of_a_generation_covers_which_samples_there_are() -> None:
    one, both = generation()[:1], generation()
    assert digest_of(one) != digest_of(both)
    moved = [rolled_out(index=0), rolled_out(index=3)]
    assert digest_of(moved) != digest_of(both)


def test_trajectory_is_named_by_sample_version_and_generation() -> None:
    samples = generation()
    mark_generation(samples)
    sample = samples[1]
    assert get_trajectory_key(sample) == ("000000-0000-0/1", 0, sample.key.generation_digest)
