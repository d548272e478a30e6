"""The training sample that a session becomes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_events.data.conversations import ASSISTANT
from relax_events.engines.protocol import GeneratedSample, GenerationRequest
from relax_events.episodes.graph import Row, path_media
from relax_events.episodes.session import Limit, Session, build_turn
from relax_events.errors import EpisodeFailed
from relax_events.events.parts import ChatMessage, FinishReason, merge_segments


def finish_sample(
    session: Session,
    *,
    trains_all_paths: bool,
    reason: FinishReason | None = None,
    error: str = "",
) -> GeneratedSample:
    """Return a session that its driver has ended as a sample: its paths, the last turn's path last.

    Args:
        session: The session.
        trains_all_paths: Whether paths that the driver left are part of the sample.
        reason: Why the sample ended, where that is not its last turn's reason. A session without a
            turn of the policy is then a lost sample, and a turn that failed is left out.
        error: What happened, for `reason`.
    Raises:
        EpisodeFailed: The driver got no turn of the policy, or its last turn failed, and no reason
            is given.
    """
    if reason is not None and not session.graph.nodes:
        return build_empty_sample(
            session.request, session.sample.sample_id, FinishReason.LOST, error=error
        )
    if reason is None and (session.error or not session.graph.nodes):
        raise EpisodeFailed(session.error or "it ended without a turn of the policy")
    sample = build_sample(
        session, session.graph.rows() if trains_all_paths else [session.graph.last_row()]
    )
    return sample if reason is None else replace(sample, finish_reason=reason, error=error)


def abort_sample(session: Session, turn: GeneratedSample | None) -> GeneratedSample:
    """Return an aborted session of one path with all its tokens, from which another worker
    continues. Its last turn has no message: its tokens may be incomplete, or its reply is missing.

    Args:
        session: The session.
        turn: As for `Session.interrupt`.
    """
    if not session.interrupt(turn):
        return build_turn(session.sample, session.request, FinishReason.ABORT)
    sample = build_sample(session, [session.graph.last_row()])
    return replace(sample, finish_reason=FinishReason.ABORT, turns=sample.turns[:-1])


def build_empty_sample(
    request: GenerationRequest, sample_id: str, reason: FinishReason, *, error: str = ""
) -> GeneratedSample:
    """Return a sample without tokens: it failed, or is begun again as a whole."""
    return GeneratedSample(
        sample_id=sample_id,
        prompt_group_id=request.prompt_group_id,
        tokens=np.empty(0, np.int32),
        logprobs=np.empty(0, np.float32),
        segments=(),
        finish_reason=reason,
        error=error,
    )


def build_sample(session: Session, rows: Sequence[Row]) -> GeneratedSample:
    """Return the paths of a session as a sample."""
    main, num_prompt = rows[-1], len(rows[0].prompt_tokens)
    last, is_new = main.nodes[-1].sample, session.has_new_prompt
    truncated = [number for number, row in enumerate(rows) if _is_truncated(session, row, main)]
    is_truncated = len(rows) - 1 in truncated
    media = [tuple(path_media(row.nodes[-1])) for row in rows]
    return GeneratedSample(
        sample_id=session.sample.sample_id,
        prompt_group_id=session.request.prompt_group_id,
        prompt_tokens=rows[0].prompt_tokens if is_new else None,
        prompt_messages=main.nodes[0].messages if is_new else (),
        tokens=_all_paths(rows, "tokens")[num_prompt:],
        logprobs=_all_paths(rows, "logprobs")[num_prompt:],
        segments=merge_segments((), (segment for row in rows for segment in row.segments)),
        finish_reason=FinishReason.LENGTH if is_truncated else last.finish_reason,
        top_tokens=_top_tokens(rows),
        loss_mask=_all_paths(rows, "loss_mask")[num_prompt:],
        turns=tuple(_turns(session, main)),
        routed_experts=_routed_experts(rows),
        path_lengths=tuple(map(len, rows)) if len(rows) > 1 else (),
        truncated_paths=tuple(truncated) if len(rows) > 1 else (),
        path_media=tuple(media) if len(rows) > 1 and any(media) else (),
        environment_rewards=session.rewards,
    )


def _is_truncated(session: Session, row: Row, main: Row) -> bool:
    """Return whether a path was truncated: its last turn was cut off by its length, or a call after
    it was refused. What bounds the whole session truncates the path of the last turn.
    """
    leaf = row.nodes[-1]
    is_refused = leaf in session.refused.get(Limit.CONTEXT, ())
    is_spent = row is main and bool(session.refused.keys() - {Limit.CONTEXT})
    return leaf.sample.finish_reason is FinishReason.LENGTH or is_refused or is_spent


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
        turns += node.messages if number else ()
        text = session.renderer.turn_text(node.sample.tokens)
        turns.append(ChatMessage.of_text(ASSISTANT, text))
    return turns


def _top_tokens(rows: Sequence[Row]) -> NDArray[np.int32] | None:
    nodes = [node for row in rows for node in row.trained]
    tops = [node.sample.top_tokens for node in nodes if node.sample.top_tokens is not None]
    return np.concatenate(tops) if tops else None
