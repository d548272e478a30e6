"""The task that a program receives, and the training sample that its session becomes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from relax_events.data.conversations import ASSISTANT
from relax_events.data.messages import print_message
from relax_events.engines.protocol import GeneratedSample, GenerationRequest
from relax_events.engines.requests import merge_segments
from relax_events.errors import EpisodeFailed
from relax_events.events.parts import ChatMessage, ContentPart, FinishReason, MediaRef
from relax_events.gateway.graph import Row, path_media
from relax_events.gateway.session import Session
from relax_events.gateway.session_media import to_chat_part


def build_task(request: GenerationRequest, *, fetch: Callable[[MediaRef], bytes]) -> dict[str, Any]:
    """Return the part of its row that a program gets: messages, metadata and tools, but no answer.

    Args:
        request: Of the prompt group, with the row for the environment.
        fetch: Returns the content of a media file.
    Raises:
        MediaError, ObjectError: A media file of the row is missing.
    """
    row = request.environment_context
    assert row is not None, "checked on submission"
    return {
        "messages": [
            print_message(message, show_part=lambda part: _show_media(part, fetch))
            for message in row.messages
        ],
        "metadata": orjson.loads(row.metadata),
        "tools": orjson.loads(row.tools) if row.tools else [],
        "prompt_group_id": request.prompt_group_id,
    }


def _show_media(part: ContentPart, fetch: Callable[[MediaRef], bytes]) -> dict[str, Any]:
    assert part.media is not None, "media of issued rows are stored"
    return to_chat_part(part.media, fetch(part.media))


def build_sample(session: Session, *, trains_all_paths: bool) -> GeneratedSample:
    """Return a finished session as the sample of its episode: its paths, the last turn's path last.

    Args:
        session: The session.
        trains_all_paths: Whether paths that the program left are part of the sample.
    Raises:
        EpisodeFailed: The program got no turn of the policy, or its last call failed.
    """
    if not session.graph.nodes:
        raise EpisodeFailed(session.error or "it ended without a turn of the policy")
    if session.error:
        raise EpisodeFailed(session.error)
    rows = session.graph.rows() if trains_all_paths else [session.graph.last_row()]
    main, num_prompt = rows[-1], len(rows[0].prompt_tokens)
    last = main.nodes[-1].sample
    segments = [segment for row in rows for segment in row.segments]
    media = [tuple(path_media(row.nodes[-1])) for row in rows]
    return GeneratedSample(
        sample_id=session.sample.sample_id,
        prompt_group_id=session.request.prompt_group_id,
        prompt_tokens=rows[0].prompt_tokens,
        prompt_messages=main.nodes[0].messages,
        tokens=_all_paths(rows, "tokens")[num_prompt:],
        logprobs=_all_paths(rows, "logprobs")[num_prompt:],
        segments=merge_segments((), segments),
        finish_reason=last.finish_reason if session.limit is None else FinishReason.LENGTH,
        top_tokens=_top_tokens(rows),
        loss_mask=_all_paths(rows, "loss_mask")[num_prompt:],
        turns=tuple(_turns(session, main)),
        routed_experts=_routed_experts(rows),
        path_lengths=tuple(map(len, rows)) if len(rows) > 1 else (),
        path_media=tuple(media) if len(rows) > 1 and any(media) else (),
    )


def _all_paths(rows: Sequence[Row], field: str) -> NDArray[Any]:
    """Return an array along the tokens of all rows; 0 for their prompts."""
    pieces: list[NDArray[Any]] = []
    for row in rows:
        values: NDArray[Any] = getattr(row, field)
        prompt = row.prompt_tokens
        pieces += [prompt if field == "tokens" else np.zeros(len(prompt), values.dtype), values]
    return np.concatenate(pieces)


def _routed_experts(rows: Sequence[Row]) -> NDArray[np.generic] | None:
    """Return the experts of all tokens but the last; the last tokens of other paths, which no
    forward has read, get zeros.
    """
    recorded = [row.nodes[-1].sample.routed_experts for row in rows]
    if any(experts is None for experts in recorded):
        return None
    pieces: list[NDArray[np.generic]] = []
    for experts in recorded:
        assert experts is not None
        pieces += [experts, np.zeros_like(experts[:1])]
    return np.concatenate(pieces[:-1])


def _turns(session: Session, row: Row) -> list[ChatMessage]:
    """Return the conversation after its first messages, ending with the last turn."""
    turns: list[ChatMessage] = []
    for number, node in enumerate(row.nodes):
        if number:
            turns += node.messages
        text = session.renderer.turn_text(node.sample.tokens)
        turns.append(ChatMessage.of_text(ASSISTANT, text))
    return turns


def _top_tokens(rows: Sequence[Row]) -> NDArray[np.int32] | None:
    nodes = [node for row in rows for node in row.trained]
    tops = [node.sample.top_tokens for node in nodes if node.sample.top_tokens is not None]
    return np.concatenate(tops) if tops else None
