"""The fields in which a ready sample differs from the generated one, with both values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from event_samples import ready, rolled_out

from relax_events.events.generations import describe_differences, describe_trajectory
from relax_events.events.parts import FinishReason, MediaRef, VersionSegment

MEDIA = MediaRef("file:///a", b"\1" * 32, "image/png", 10, width=4, height=4)
DIFFERENCES: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({}, ""),
    "advantages": ({"advantages": np.zeros(4, np.float32)}, ""),
    "finish reason": ({"finish_reason": FinishReason.LATE}, "finish_reason was stop, is late"),
    "prompt": ({"num_prompt_tokens": 3}, "num_prompt_tokens was 2, is 3"),
    "paths": ({"path_lengths": [2, 2]}, "path_lengths was [], is [2, 2]"),
    "segments": (
        {"version_segments": [VersionSegment(1, 2)]},
        "version_segments was [VersionSegment(policy_version=0",
    ),
    "media": ({"media": [MEDIA]}, f"media was [[]], is [['{'01' * 8}']]"),
    "length": ({"tokens": np.array([5, 6], np.int32)}, "tokens was int32[4], is int32[2]"),
    "type": (
        {"loss_mask": np.array([0, 0, 1, 1], np.int8)},
        "loss_mask was uint8[4], is int8[4]",
    ),
    "zero": (
        {"rollout_logprobs": np.array([0, -0.0, -0.5, -0.25], np.float32)},
        "rollout_logprobs differs in the sign of a zero",
    ),
    "experts": ({"routed_experts": np.zeros((3, 1, 1), np.uint8)}, "routed_experts differs"),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_every_field_of_a_trajectory_is_named_if_it_differs(name: str) -> None:
    changes, expected = DIFFERENCES[name]
    generated, trained = rolled_out(), ready(**changes)
    difference = describe_differences(generated, trained)
    assert difference.startswith(expected)
    assert bool(difference) == (describe_trajectory(generated) != describe_trajectory(trained))
