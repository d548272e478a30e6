"""The gateway's HTTP application: one base_url for all sessions, and a key for each.

    POST /v1/chat/completions    OpenAI's chat   \
    POST /v1/responses           OpenAI          | KEY --> the session of the key
    POST /v1/messages            Anthropic       /
    POST /v1/messages/count_tokens
    GET  /v1/models
    POST /sessions, /sessions/finish   harnesses that people start: see `offer_routes`

A call that waits long gets comments in its stream, so that no proxy or client gives it up. An
invalid call is refused with a status as long as its stream has not begun.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import Lifespan

from relax_events import __version__
from relax_events.api.drivers import Node, SessionClosed, SessionLimit
from relax_events.api.errors import EngineFailed, ObjectError, PoisonSample, StoreUnavailable
from relax_events.api.http import GuardLimits, RequestGuard, RequestHead
from relax_events.packages.gateway.anthropic_dialect import (
    AnthropicCall,
    AnthropicPrompt,
    anthropic_error,
)
from relax_events.packages.gateway.chat_dialect import ChatCall, openai_error
from relax_events.packages.gateway.chat_session import ChatSession
from relax_events.packages.gateway.dialect import AnswerHead, ModelCall, Problem, describe
from relax_events.packages.gateway.disconnects import cancel_on_disconnect
from relax_events.packages.gateway.offer_routes import add_offer_routes
from relax_events.packages.gateway.offers import SessionOffers
from relax_events.packages.gateway.responses_dialect import ResponsesCall
from relax_events.packages.gateway.session_keys import NO_KEY, Callers, SessionKeys, require_session

BODY_SECONDS = 60.0
CALL_SECONDS = 3600.0
EPISODE_CALL_SECONDS = 24 * CALL_SECONDS
"""Of a call in an episode: the engine may be drained meanwhile, and the time that its program takes
by itself has a deadline of its own."""
COMMENT_SECONDS = 10.0
"""Between two comments in a stream whose answer is not there yet; before the first, a call that
fails is refused with a status."""
REFUSALS = (
    SessionLimit,
    SessionClosed,
    PoisonSample,
    EngineFailed,
    ObjectError,
    StoreUnavailable,
)
"""The errors of a session that its program receives."""


def build_gateway(
    keys: SessionKeys,
    *,
    model_name: str,
    host: str = "127.0.0.1",
    token: str = "",
    offers: SessionOffers | None = None,
) -> RequestGuard:
    """Build the application.

    Args:
        keys: The open sessions.
        model_name: The name under which the policy is listed; calls may use any other.
        host: Address that the server listens on.
        token: Which a harness must have to take a session.
        offers: The episodes of harnesses that people start, if they drive the policy.
    """
    app = build_dialect_app(model_name)
    if offers is not None:
        add_offer_routes(app, offers, model_name=model_name)
    return RequestGuard(
        app,
        identify=Callers(keys, token=token, offers=offers).identify,
        problem=build_problem_body,
        host=host,
        limits=GuardLimits(body_seconds=BODY_SECONDS, call_seconds=EPISODE_CALL_SECONDS),
        denied=NO_KEY,
    )


def build_dialect_app(model_name: str, *, lifespan: Lifespan[FastAPI] | None = None) -> FastAPI:
    """Build the routes of all dialects, without a guard.

    Args:
        model_name: The name under which the model is listed; calls may use any other.
        lifespan: What runs as long as the application.
    """
    app = FastAPI(
        title="Relax Events gateway",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
    )

    @app.get("/v1/models")
    def models(request: Request) -> dict[str, Any]:
        """List the policy, as the clients of both vendors read it."""
        return _model_list(model_name, require_session(request).bounds.max_context_tokens)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request, call: ChatCall) -> Response:
        """Sample the next turn of a session, in the dialect of OpenAI's chat."""
        return await _serve(request, require_session(request, call), call, model_name)

    @app.post("/v1/responses")
    async def responses(request: Request, call: ResponsesCall) -> Response:
        """Sample the next turn of a session, in the dialect of OpenAI's responses."""
        return await _serve(request, require_session(request, call), call, model_name)

    @app.post("/v1/messages")
    async def messages(request: Request, call: AnthropicCall) -> Response:
        """Sample the next turn of a session, in the dialect of Anthropic's messages."""
        return await _serve(request, require_session(request, call), call, model_name)

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(request: Request, call: AnthropicPrompt) -> Response:
        """Count what the policy would read."""
        session = require_session(request, call)
        try:
            count = await session.count_tokens(call.history(session), tools=call.write_tools())
        except REFUSALS as error:
            return _refuse(request, describe(error, session))
        return JSONResponse({"input_tokens": count})

    app.add_exception_handler(RequestValidationError, _not_understood)
    app.add_exception_handler(HTTPException, _http_error)
    return app


async def _serve(
    request: Request, session: ChatSession, call: ModelCall, model_name: str
) -> Response:
    """Answer a call, whole or as a stream."""
    head = AnswerHead(secrets.token_hex(12), call.model or model_name)
    work = asyncio.ensure_future(_chat(session, call, head))
    wait = asyncio.wait([work], timeout=COMMENT_SECONDS if call.stream else None)
    is_streamed = False
    try:
        await cancel_on_disconnect(request, wait)
        if call.stream and not (work.done() and work.exception()):
            is_streamed = True
            return StreamingResponse(
                _stream(session, call, head, work), media_type="text/event-stream"
            )
        return JSONResponse(call.answer(work.result(), head))
    except REFUSALS as error:
        return _refuse(request, describe(error, session))
    finally:
        if not is_streamed:
            await _stop(work)


async def _chat(session: ChatSession, call: ModelCall, head: AnswerHead) -> Node:
    """Have the policy answer a call.

    Raises:
        SessionLimit, SessionClosed, PoisonSample, EngineFailed, ObjectError, StoreUnavailable: See
            `ChatSession.chat`.
    """
    node = await session.chat(
        call.history(session),
        tools=call.write_tools(),
        max_tokens=call.bound,
        max_calls=call.max_calls,
    )
    call.record(session, node, head)
    return node


async def _stream(
    session: ChatSession, call: ModelCall, head: AnswerHead, work: asyncio.Future[Node]
) -> AsyncGenerator[bytes]:
    try:
        while not work.done():
            yield b": waiting for the policy\n\n"
            await asyncio.wait([work], timeout=COMMENT_SECONDS)
        for event in call.events(work.result(), head):
            yield event
    except REFUSALS as error:
        yield call.failure_event(describe(error, session), head)
    finally:
        await _stop(work)


async def _stop(work: asyncio.Future[Node]) -> None:
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)


def _model_list(name: str, max_context_tokens: int) -> dict[str, Any]:
    card = {
        "id": name,
        "object": "model",
        "type": "model",
        "display_name": name,
        "created": 0,
        "created_at": "1970-01-01T00:00:00Z",
        "owned_by": "relax-events",
        "max_model_len": max_context_tokens,
    }
    pages = {"has_more": False, "first_id": name, "last_id": name}
    return {"object": "list", "data": [card]} | pages


def _refuse(request: Request, problem: Problem) -> JSONResponse:
    """Return a problem in the format of the dialect that a request speaks."""
    body = _body(RequestHead.from_scope(request.scope), problem)
    return JSONResponse(body, status_code=problem.status, headers=problem.headers)


def _body(head: RequestHead, problem: Problem) -> dict[str, Any]:
    is_anthropic = "anthropic-version" in head.headers or head.path.startswith("/v1/messages")
    return anthropic_error(problem) if is_anthropic else openai_error(problem)


def build_problem_body(head: RequestHead, status: int, text: str) -> bytes:
    """Return a refusal of the guard in the format of the dialect that a request speaks."""
    code = "invalid_key" if status == 401 else "invalid_request"
    return orjson.dumps(_body(head, Problem(status=status, text=text, code=code)))


def _not_understood(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    texts = (
        f"{'.'.join(map(str, one['loc'][1:])) or 'body'}: {one['msg']}" for one in error.errors()
    )
    return _refuse(request, Problem(status=400, text="; ".join(texts)))


def _http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    return _refuse(
        request,
        Problem(status=error.status_code, text=error.detail, code="invalid_key", is_final=True),
    )
