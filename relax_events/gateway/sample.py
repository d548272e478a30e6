"""The task that a program receives, and the training sample that its session becomes."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from relax_events.data.conversations import ASSISTANT
from relax_events.engines.protocol import GeneratedSample, GenerationRequest
from relax_events.events.parts import ChatMessage, FinishReason
from relax_events.gateway.graph import Row
from relax_events.gateway.messages import text_of
from relax_events.gateway.program import EpisodeFailed
from relax_events.gateway.session import Session


def build_task(request: GenerationRequest) -> dict[str, Any]:
    """Return what a program learns of its row: messages, metadata and tools, never the answer.

    Args:
        request: Of the prompt group, with the row for the environment.
    """
    row = request.environment_context
    assert row is not None, "checked on submission"
    return {
        "messages": [{"role": message.role, "content": message.text} for message in row.messages],
        "metadata": orjson.loads(row.metadata),
        "tools": orjson.loads(row.tools) if row.tools else [],
        "prompt_group_id": request.prompt_group_id,
    }


def build_sample(session: Session) -> GeneratedSample:
    """Return a finished session as the sample of its episode: the path to its last turn.

    Raises:
        EpisodeFailed: The program got no turn of the policy, or its last call failed.
    """
    if not session.graph.nodes:
        raise EpisodeFailed(session.error or "it ended without a turn of the policy")
    if session.error:
        raise EpisodeFailed(session.error)
    row = session.graph.rows()[0]
    last = row.nodes[-1].sample
    return GeneratedSample(
        sample_id=session.sample.sample_id,
        prompt_group_id=session.request.prompt_group_id,
        prompt_tokens=row.prompt_tokens,
        prompt_messages=tuple(_message(one) for one in row.nodes[0].messages),
        tokens=row.tokens,
        logprobs=row.logprobs,
        segments=row.segments,
        finish_reason=last.finish_reason if session.limit is None else FinishReason.LENGTH,
        top_tokens=_top_tokens(row),
        loss_mask=row.loss_mask,
        turns=tuple(_turns(session, row)),
        routed_experts=last.routed_experts,
    )


def _turns(session: Session, row: Row) -> list[ChatMessage]:
    """Return the conversation after its first messages, ending with the last turn."""
    turns: list[ChatMessage] = []
    for number, node in enumerate(row.nodes):
        if number:
            turns += [_message(message) for message in node.messages]
        text = session.renderer.reply_text(node.sample.tokens)
        turns.append(ChatMessage.of_text(ASSISTANT, text))
    return turns


def _message(message: Any) -> ChatMessage:
    return ChatMessage.of_text(str(message["role"]), text_of(message))


def _top_tokens(row: Row) -> NDArray[np.int32] | None:
    tops = [node.sample.top_tokens for node in row.nodes if node.sample.top_tokens is not None]
    return np.concatenate(tops) if tops else None
