"""A session of the gateway without a prompt group of a run, whose turns a function samples."""

from __future__ import annotations

from typing import Any

import numpy as np

from relax_events.config import SamplingConfig
from relax_events.data.rendering import PromptRenderer
from relax_events.engines.protocol import GenerationRequest, SampleRequest
from relax_events.episodes.render_queue import RenderQueue
from relax_events.episodes.session import Generate, SessionBounds
from relax_events.packages.gateway.chat_session import ChatSession


def open_session(
    renderer: PromptRenderer,
    generate: Generate,
    *,
    name: str = "000000-0000-0",
    seed: int = 1,
    max_turns: int = 40,
    max_new_tokens: int = 400,
    max_context_tokens: int = 4000,
    **more: Any,
) -> ChatSession:
    """Open a session whose turns a function samples, with a queue of its own; `more` are
    further fields of the session.
    """
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
    bounds = SessionBounds(max_turns=max_turns, max_context_tokens=max_context_tokens)
    queue = RenderQueue.of_renderer(renderer)
    return ChatSession(request, sample, bounds, renderer, queue, generate, **more)
