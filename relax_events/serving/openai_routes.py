"""The part of OpenAI's API that asks a model for text."""

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

from relax_events.errors import ConfigError
from relax_events.events.parts import ChatMessage
from relax_events.serving.completions import Answer, Question, Respondent, merged
from relax_events.serving.schemas import ChatBody, CompletionBody, SamplingParams
from relax_events.serving.streams import event_stream, unless_gone

Choice = Callable[[str, bool], dict[str, Any]]
"""Puts a text into a choice, whole or a piece of it."""


def openai_routes(respondent: Respondent, *, model_name: str, max_context_tokens: int) -> APIRouter:
    """Make the routes.

    Args:
        respondent: Answers.
        model_name: What the model is called.
        max_context_tokens: Prompt and answer together; an answer that is given no bound has what is
            left.
    """
    routes, renderer = APIRouter(prefix="/v1"), respondent.renderer

    @routes.get("/models")
    def models() -> dict[str, Any]:
        """Name the one model that is served."""
        return {
            "object": "list",
            "data": [
                {
                    "id": model_name,
                    "object": "model",
                    "owned_by": "relax-events",
                    "max_model_len": max_context_tokens,
                }
            ],
        }

    @routes.post("/completions")
    async def completions(request: Request, body: CompletionBody) -> Response:
        """Go on from a text."""
        prompts: Any = (
            body.prompt
            if isinstance(body.prompt, list) and not isinstance(body.prompt[0], int)
            else [body.prompt]
        )
        tokens = [
            renderer.encode(one) if isinstance(one, str) else np.array(one, np.int32)
            for one in prompts
        ]
        answers = _Answers(
            respondent, "text_completion", model_name, lambda text, _: {"text": text}
        )
        return await answers.reply(
            request,
            _questions(tokens, body.params(body.max_tokens), is_streamed=body.stream),
            is_streamed=body.stream,
        )

    @routes.post("/chat/completions")
    async def chat_completions(request: Request, body: ChatBody) -> Response:
        """Answer the last message of a conversation."""
        if not renderer.has_template:
            raise ConfigError("the model's tokenizer has no chat template; ask /v1/completions")
        tokens = renderer.prompt_tokens(
            [ChatMessage.of_text(turn.role, turn.text) for turn in body.messages]
        )
        bound = (
            body.max_completion_tokens
            or body.max_tokens
            or max(1, max_context_tokens - len(tokens))
        )
        answers = _Answers(respondent, "chat.completion", model_name, _message)
        return await answers.reply(
            request,
            _questions([tokens], body.params(bound), is_streamed=body.stream),
            is_streamed=body.stream,
        )

    return routes


def _message(text: str, is_piece: bool) -> dict[str, Any]:
    return {"delta" if is_piece else "message": {"role": "assistant", "content": text}}


def _questions(
    prompts: list[NDArray[np.int32]], params: SamplingParams, *, is_streamed: bool
) -> list[Question]:
    """Ask for `n` answers to each prompt; seeds that were given count on, so that the answers
    differ.
    """
    questions = []
    for tokens in prompts:
        for number in range(params.n):
            own = (
                {}
                if params.sampling_seed is None
                else {"sampling_seed": params.sampling_seed + number}
            )
            rid = secrets.token_hex(16)
            questions.append(
                Question(
                    rid=rid,
                    tokens=tokens,
                    params=params.model_copy(update=own),
                    is_streamed=is_streamed,
                )
            )
    return questions


class _Answers:
    """Writes answers in OpenAI's form."""

    def __init__(self, respondent: Respondent, kind: str, model_name: str, choice: Choice) -> None:
        self._respondent, self._kind, self._choice = respondent, kind, choice
        self._head = {
            "id": f"relax-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model_name,
        }

    async def reply(
        self, request: Request, questions: list[Question], *, is_streamed: bool
    ) -> Response:
        """Answer, at once or piece by piece."""
        if is_streamed:
            return StreamingResponse(
                event_stream(self._pieces(questions)), media_type="text/event-stream"
            )
        return JSONResponse(await unless_gone(request, self._whole(questions)))

    async def _whole(self, questions: list[Question]) -> dict[str, Any]:
        async with aclosing(merged(self._respondent, questions)) as answers:
            found = {number: answer async for number, answer in answers}
        choices = [
            self._choice(found[number].text, False) | _ending(found[number]) | {"index": number}
            for number in range(len(questions))
        ]
        prompt_tokens = sum(
            len(tokens)
            for tokens in {id(question.tokens): question.tokens for question in questions}.values()
        )
        completion_tokens = sum(len(answer.tokens) for answer in found.values())
        usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        }
        return self._head | {"object": self._kind, "choices": choices, "usage": usage}

    async def _pieces(self, questions: list[Question]) -> AsyncGenerator[bytes]:
        shown = [0] * len(questions)
        kind = self._kind if self._kind == "text_completion" else f"{self._kind}.chunk"
        async with aclosing(merged(self._respondent, questions)) as answers:
            async for number, answer in answers:
                # Bytes that are no whole character yet come as a replacement, which the next piece
                # must not follow.
                text = answer.text if answer.finish else answer.text.rstrip("\ufffd")
                choice = (
                    self._choice(text[shown[number] :], True) | _ending(answer) | {"index": number}
                )
                shown[number] = max(shown[number], len(text))
                yield orjson.dumps(self._head | {"object": kind, "choices": [choice]})


def _ending(answer: Answer) -> dict[str, Any]:
    finish = answer.finish or {"type": None}
    return {"finish_reason": finish["type"], "matched_stop": finish.get("matched")}
