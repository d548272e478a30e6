"""The turns of a scripted policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_events.engines.protocol import GeneratedSample, GenerationRequest
from relax_events.events.parts import FinishReason, VersionSegment


def spoken_turn(
    request: GenerationRequest,
    tokens: Sequence[int] | NDArray[Any],
    *,
    logprobs: Sequence[float] = (),
    policy_version: int = 0,
    finish_reason: FinishReason = FinishReason.STOP,
) -> GeneratedSample:
    """Return given tokens as the turn that a request asks for.

    Args:
        request: With one sample.
        tokens: The turn, with its stop token if it has one.
        logprobs: Of each token; -0.5 for all if empty.
        policy_version: Of all tokens.
        finish_reason: Why it ended.
    """
    (sample,) = request.samples
    return GeneratedSample(
        sample_id=sample.sample_id,
        prompt_group_id=request.prompt_group_id,
        tokens=np.array(tokens, np.int32),
        logprobs=np.array(logprobs or [-0.5] * len(tokens), np.float32),
        segments=(VersionSegment(policy_version, len(tokens)),),
        finish_reason=finish_reason,
    )
