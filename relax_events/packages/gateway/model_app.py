"""The application of `relax serve`: the gateway's dialects and the token route over a model without
a run.

    GET  /health                     200, or 503 once the engine has failed; needs no token
    POST /inference/v1/generate      see `token_route`
    and the dialects of `app`        TOKEN --> a session for each call
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Response

from relax_events.api.engines import EngineConfig
from relax_events.api.http import (
    BodyBound,
    GuardLimits,
    Identify,
    Identity,
    RequestGuard,
    RequestHead,
    is_same_secret,
)
from relax_events.packages.gateway.app import BODY_SECONDS, build_dialect_app, build_problem_body
from relax_events.packages.gateway.sampling import CallSampling
from relax_events.packages.gateway.served_model import ServedModel
from relax_events.packages.gateway.session_keys import ModelClient, read_keys
from relax_events.packages.gateway.token_route import add_token_route

HEALTH = "/health"
CALL_SECONDS = 4 * 3600.0
"""Deadline of a call: long samples on a CPU, behind others."""
CALLS_PER_ROW = 17
"""Calls in the engine, as a multiple of the samples that it decodes at once; other calls wait for
their turn, and calls beyond the queue's limit are refused with 429."""
MAX_CONNECTIONS = 4096
MAX_BYTES = 256 * 1024**2
"""Of large bodies at once."""
PROBE = Identity(name="probe", body=BodyBound(num_bytes=0))


def build_model_app(
    model: ServedModel, engine: EngineConfig, *, token: str, host: str = "127.0.0.1"
) -> RequestGuard:
    """Build the application; the engine runs while the application does.

    Args:
        model: The loaded model.
        engine: Bounds on rows and context.
        token: Required from every client.
        host: Address to listen on.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        model.engine.open()
        yield
        model.close()

    app = build_dialect_app(model.name, lifespan=lifespan)
    add_token_route(app, model)

    @app.get(HEALTH)
    def health() -> Response:
        """Report whether the engine runs."""
        return Response(status_code=200 if model.engine.failure is None else 503)

    client = Identity(
        name="client",
        body=model.open_session(CallSampling()).body_bound,
        max_calls=engine.max_running_samples * CALLS_PER_ROW,
        max_bytes=MAX_BYTES,
        max_connections=MAX_CONNECTIONS,
        subject=ModelClient(model.open_session),
    )
    return RequestGuard(
        app,
        identify=identify_client(token, client),
        problem=build_problem_body,
        host=host,
        limits=GuardLimits(body_seconds=BODY_SECONDS, call_seconds=CALL_SECONDS),
        is_any_host=True,
    )


def identify_client(token: str, client: Identity) -> Identify:
    """Return the rule that lets in clients with the token, in the header of either vendor, and
    probes of the health.
    """

    def identify(head: RequestHead) -> Identity | None:
        if any(is_same_secret(key, token) for key in read_keys(head)):
            return client
        return PROBE if head.method == "GET" and head.path == HEALTH else None

    return identify
