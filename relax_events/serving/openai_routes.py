"""OpenAI's routes for text completion and chat completion."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import numpy as np
import orjson
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from numpy.typing import NDArray

from relax_events.data.rendering import PromptRenderer
from relax_events.errors import ConfigError
from relax_events.events.parts import ChatMessage
from relax_events.serving.completions import (
    Completion,
    CompletionRequest,
    CompletionService,
    merge_streams,
)
from relax_events.serving.schemas import ChatBody, CompletionBody, SamplingParams
from relax_events.serving.streams import cancel_on_disconnect, event_stream

Choice = Callable[[str, bool], dict[str, Any]]
"""Builds a choice from a text; the flag says whether it is a streamed delta."""


def openai_routes(
    service: CompletionService, *, model_name: str, max_context_tokens: int
) -> APIRouter:
    """Build the routes.

    Args:
        service: Generates the completions.
        model_name: Name of the model.
        max_context_tokens: Prompt and completion together; a completion without a limit may use the
            rest.
    """
    routes, renderer = APIRouter(prefix="/v1"), service.renderer

    @routes.get("/models")
    def models() -> dict[str, Any]:
        """List the served model."""
        model = {
            "id": model_name,
            "object": "model",
            "owned_by": "relax-events",
            "max_model_len": max_context_tokens,
        }
        return {"object": "list", "data": [model]}

    @routes.post("/completions")
    async def completions(request: Request, body: CompletionBody) -> Response:
        """Continue a text."""
        tokens = _encode_prompts(renderer, body)
        writer = _ResponseWriter(
            service, "text_completion", model_name, lambda text, _: {"text": text}
        )
        return await writer.respond(
            request,
            _build_requests(tokens, body.params(body.max_tokens), is_streamed=body.stream),
            is_streamed=body.stream,
        )

    @routes.post("/chat/completions")
    async def chat_completions(request: Request, body: ChatBody) -> Response:
        """Reply to the last message of a conversation."""
        if not renderer.has_template:
            raise ConfigError("the model's tokenizer has no chat template; use /v1/completions")
        tokens = renderer.prompt_tokens(
            [ChatMessage.of_text(turn.role, turn.text) for turn in body.messages]
        )
        bound = (
            body.max_completion_tokens
            or body.max_tokens
            or max(1, max_context_tokens - len(tokens))
        )
        writer = _ResponseWriter(service, "chat.completion", model_name, _message)
        return await writer.respond(
            request,
            _build_requests([tokens], body.params(bound), is_streamed=body.stream),
            is_streamed=body.stream,
        )

    return routes


def _encode_prompts(renderer: PromptRenderer, body: CompletionBody) -> list[NDArray[np.int32]]:
    """Return the token ids of each prompt; the body has one or several, as text or as token ids."""
    prompts: Any = (
        body.prompt
        if isinstance(body.prompt, list) and not isinstance(body.prompt[0], int)
        else [body.prompt]
    )
    return [
        renderer.encode(one) if isinstance(one, str) else np.array(one, np.int32) for one in prompts
    ]


def _message(text: str, is_piece: bool) -> dict[str, Any]:
    return {"delta" if is_piece else "message": {"role": "assistant", "content": text}}


def _build_requests(
    prompts: list[NDArray[np.int32]], params: SamplingParams, *, is_streamed: bool
) -> list[CompletionRequest]:
    """Build `n` requests for each prompt; a given seed is incremented, so that the completions
    differ.
    """
    requests = []
    for tokens in prompts:
        for number in range(params.n):
            own = (
                {}
                if params.sampling_seed is None
                else {"sampling_seed": params.sampling_seed + number}
            )
            rid = secrets.token_hex(16)
            requests.append(
                CompletionRequest(
                    rid=rid,
                    tokens=tokens,
                    params=params.model_copy(update=own),
                    is_streamed=is_streamed,
                )
            )
    return requests


class _ResponseWriter:
    """Writes completions in OpenAI's format."""

    def __init__(
        self, service: CompletionService, kind: str, model_name: str, choice: Choice
    ) -> None:
        self._service, self._kind, self._choice = service, kind, choice
        self._head = {
            "id": f"relax-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model_name,
        }

    async def respond(
        self, request: Request, requests: list[CompletionRequest], *, is_streamed: bool
    ) -> Response:
        """Respond, at once or streamed."""
        if is_streamed:
            return StreamingResponse(
                event_stream(self._pieces(requests)), media_type="text/event-stream"
            )
        return JSONResponse(await cancel_on_disconnect(request, self._whole(requests)))

    async def _whole(self, requests: list[CompletionRequest]) -> dict[str, Any]:
        async with aclosing(merge_streams(self._service, requests)) as completions:
            found = {number: completion async for number, completion in completions}
        choices = [
            self._choice(found[number].text, False)
            | _finish_reason_fields(found[number])
            | {"index": number}
            for number in range(len(requests))
        ]
        prompt_tokens = sum(
            len(tokens)
            for tokens in {id(request.tokens): request.tokens for request in requests}.values()
        )
        completion_tokens = sum(len(completion.tokens) for completion in found.values())
        usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        }
        return self._head | {"object": self._kind, "choices": choices, "usage": usage}

    async def _pieces(self, requests: list[CompletionRequest]) -> AsyncGenerator[bytes]:
        sent = [0] * len(requests)
        kind = self._kind if self._kind == "text_completion" else f"{self._kind}.chunk"
        async with aclosing(merge_streams(self._service, requests)) as completions:
            async for number, completion in completions:
                # Bytes of an incomplete character decode to a replacement character; hold it back.
                text = completion.text if completion.finish else completion.text.rstrip("\ufffd")
                choice = (
                    self._choice(text[sent[number] :], True)
                    | _finish_reason_fields(completion)
                    | {"index": number}
                )
                sent[number] = max(sent[number], len(text))
                yield orjson.dumps(self._head | {"object": kind, "choices": [choice]})


def _finish_reason_fields(completion: Completion) -> dict[str, Any]:
    finish = completion.finish or {"type": None}
    return {"finish_reason": finish["type"], "matched_stop": finish.get("matched")}
