"""The gateway's HTTP application: one base_url for all sessions, and a key for each.

    POST /v1/chat/completions    Authorization: Bearer KEY --> the session of the key
    GET  /v1/models

A call that waits long gets comments in its stream, so that no proxy or client gives it up.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException

from relax_events import __version__
from relax_events.errors import EngineFailed, PoisonSample
from relax_events.gateway.chat_dialect import ChatCall, answer_events, whole_answer
from relax_events.gateway.graph import Node
from relax_events.gateway.session import Session, SessionClosed, SessionLimit
from relax_events.http.server import RequestGuard
from relax_events.serving.streams import END, cancel_on_disconnect

MAX_BODY_BYTES = 64 * 1024**2
BODY_SECONDS = 60.0
COMMENT_SECONDS = 10.0
"""Between two comments in a stream whose answer is not there yet."""
RETRY_SECONDS = 1
BEARER = "bearer "


class SessionKeys:
    """The open sessions by key."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}

    def open(self, session: Session) -> str:
        """Add a session, and return its key."""
        key = f"relax-{secrets.token_urlsafe(24)}"
        self._sessions[key] = session
        return key

    def close(self, key: str) -> None:
        """Close the session of a key; the key is unknown from now on."""
        if (session := self._sessions.pop(key, None)) is not None:
            session.close()

    def find(self, request: Request) -> Session:
        """Return the session whose key a request has.

        Raises:
            HTTPException: 401, the request has no key, or one of no open session.
        """
        given = request.headers.get("authorization", "")
        key = given[len(BEARER) :] if given.lower().startswith(BEARER) else ""
        session = self._sessions.get(key or request.headers.get("x-api-key", ""))
        if session is None:
            raise HTTPException(401, "no key, or none of an open session")
        return session


def build_gateway(keys: SessionKeys, *, model_name: str, host: str = "127.0.0.1") -> RequestGuard:
    """Build the application.

    Args:
        keys: The open sessions.
        model_name: The name under which the policy is listed; calls may use any other.
        host: Address that the server listens on.
    """
    app = FastAPI(title="Relax Events gateway", version=__version__, docs_url=None, redoc_url=None)

    @app.get("/v1/models")
    def models(request: Request) -> dict[str, Any]:
        """List the policy."""
        bounds = keys.find(request).bounds
        card = {
            "id": model_name,
            "object": "model",
            "owned_by": "relax-events",
            "max_model_len": bounds.max_context_tokens,
        }
        return {"object": "list", "data": [card]}

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request, call: ChatCall) -> Response:
        """Sample the next turn of a session."""
        session, name = keys.find(request), secrets.token_hex(12)
        model = call.model or model_name
        if call.stream:
            with_usage = call.stream_options is not None and call.stream_options.include_usage
            return StreamingResponse(
                _stream(
                    session,
                    call,
                    lambda node: answer_events(node, name=name, model=model, with_usage=with_usage),
                ),
                media_type="text/event-stream",
            )
        return await cancel_on_disconnect(
            request,
            _answer(session, call, lambda node: whole_answer(node, name=name, model=model)),
        )

    app.add_exception_handler(RequestValidationError, _not_understood)
    app.add_exception_handler(HTTPException, _http_error)
    return RequestGuard(
        app,
        problem=lambda code, text: bytes(problem(code, text).body),
        host=host,
        max_body_bytes=MAX_BODY_BYTES,
        body_seconds=BODY_SECONDS,
    )


def _chat(session: Session, call: ChatCall) -> Awaitable[Node]:
    return session.chat(call.messages, tools=call.tool_list, max_tokens=call.bound)


async def _answer(
    session: Session, call: ChatCall, build: Callable[[Node], dict[str, Any]]
) -> Response:
    try:
        return JSONResponse(build(await _chat(session, call)))
    except (SessionLimit, SessionClosed, PoisonSample, EngineFailed) as error:
        return describe(error, session)


async def _stream(
    session: Session, call: ChatCall, events: Callable[[Node], Any]
) -> AsyncGenerator[bytes]:
    work = asyncio.ensure_future(_chat(session, call))
    try:
        while not (await asyncio.wait([work], timeout=COMMENT_SECONDS))[0]:
            yield b": waiting for the policy\n\n"
        for event in events(work.result()):
            yield b"data: " + event + b"\n\n"
        yield END
    except (SessionLimit, SessionClosed, PoisonSample, EngineFailed) as error:
        yield b"data: " + bytes(describe(error, session).body) + b"\n\n"
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


def describe(error: Exception, session: Session) -> JSONResponse:
    """Return an error of a session as OpenAI's clients understand it: 4xx are final, 503 is tried
    again.
    """
    if isinstance(error, SessionLimit):
        return problem(400, str(error), code=error.limit.value)
    if isinstance(error, SessionClosed):
        return problem(410, str(error), code="session_closed", is_final=True)
    if isinstance(error, PoisonSample):
        session.num_refused += 1
        return problem(400, str(error), code="invalid_messages")
    return problem(503, str(error), code="engine_failed", retry_after_seconds=RETRY_SECONDS)


def problem(
    status: int,
    text: str,
    *,
    code: str = "invalid_request",
    retry_after_seconds: int = 0,
    is_final: bool = False,
) -> JSONResponse:
    """Build an error in OpenAI's format.

    Args:
        status: HTTP status.
        text: What is wrong.
        code: The cause.
        retry_after_seconds: When to try again; 0 leaves the header out.
        is_final: Whether the client must not try again, whatever the status.
    """
    headers = {"Retry-After": str(retry_after_seconds)} if retry_after_seconds else {}
    if is_final:
        headers["x-should-retry"] = "false"
    kind = "invalid_request_error" if status < 500 else "server_error"
    body = {"error": {"message": text, "type": kind, "code": code, "param": None}}
    return JSONResponse(body, status_code=status, headers=headers)


def _not_understood(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    texts = (
        f"{'.'.join(map(str, one['loc'][1:])) or 'body'}: {one['msg']}" for one in error.errors()
    )
    return problem(400, "; ".join(texts))


def _http_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    return problem(error.status_code, error.detail, code="invalid_key", is_final=True)
