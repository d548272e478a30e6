"""Sessions of the gateway without a prompt group of a run, and the turns of a scripted policy: for
tests, and for `benchmarks.gateway`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_events.config import SamplingConfig
from relax_events.engines.protocol import GeneratedSample, GenerationRequest, SampleRequest
from relax_events.events.parts import FinishReason, VersionSegment
from relax_events.gateway.chat_renderer import ChatRenderer
from relax_events.gateway.session import Generate, Session, SessionBounds


def open_session(
    renderer: ChatRenderer,
    generate: Generate,
    *,
    name: str = "000000-0000-0",
    seed: int = 1,
    max_turns: int = 40,
    max_new_tokens: int = 400,
    max_context_tokens: int = 4000,
    **more: Any,
) -> Session:
    """Open a session whose turns a function samples; `more` are further fields of the session."""
    empty = np.empty(0, np.int32)
    sample = SampleRequest(
        sample_id=f"{name}/0",
        seed=seed,
        tokens=empty,
        logprobs=empty.astype(np.float32),
        segments=(),
    )
    request = GenerationRequest(
        prompt_group_id=name,
        prompt_tokens=empty,
        samples=(sample,),
        sampling=SamplingConfig(max_new_tokens=max_new_tokens),
        stop_token_ids=renderer.stop_token_ids,
    )
    bounds = SessionBounds(
        max_turns=max_turns, max_new_tokens=max_new_tokens, max_context_tokens=max_context_tokens
    )
    return Session(request, sample, bounds, renderer, generate, **more)


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
