"""The application: SGLang's routes and OpenAI's over one engine."""

from __future__ import annotations

import hmac
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from relax_events import __version__
from relax_events.config import DataConfig, EngineConfig, ModelConfig
from relax_events.data.rendering import PromptRenderer
from relax_events.engines.api.answers import Respondent
from relax_events.engines.api.native import native_routes
from relax_events.engines.api.openai import openai_routes
from relax_events.engines.api.station import Station
from relax_events.engines.sglang.checkpoint import ModelFolder
from relax_events.engines.transformers import TransformersEngine
from relax_events.errors import ConfigError, EngineFailed, PoisonSample, RelaxError

SUMMARY = "A model by engine `transformers`, behind SGLang's HTTP API."
CALLERS = "http"
"""Where prompts come from."""
BAD, DENIED, BROKEN = 400, 401, 503
Next = Callable[[Request], Awaitable[Response]]


def make_app(model: ModelConfig, engine: EngineConfig, *, model_name: str, is_incremental: bool = False, token: str = "") -> FastAPI:
    """Load a model and make the application that serves it; the engine runs while the application does.

    Args:
        model: Folder, dtype and device, and whether it is told which experts tokens go through.
        engine: Bounds on rows and context.
        model_name: What OpenAI's clients call it.
        is_incremental: Whether a streamed event has what is new, or all so far.
        token: Without which nobody is answered; empty for everybody.
    Raises:
        ConfigError: The model can't be loaded or served.
    """
    recorded = ModelFolder.read(model.path, records_experts=True) if model.replays_routing else None
    station = Station(TransformersEngine(model.path, config=engine, model=model))
    respondent = Respondent(station, _renderer(model.path))

    @asynccontextmanager
    async def runs(_: FastAPI) -> AsyncIterator[None]:
        station.open()
        yield
        station.close()

    app = FastAPI(title="Relax Events", version=__version__, summary=SUMMARY, lifespan=runs)
    app.include_router(native_routes(respondent, model_path=model.path.absolute(), recorded=recorded, is_incremental=is_incremental))
    app.include_router(openai_routes(respondent, model_name=model_name, max_context_tokens=engine.max_context_tokens))
    app.add_exception_handler(RequestValidationError, _not_understood)
    app.add_exception_handler(RelaxError, _refused)
    if token:
        app.middleware("http")(_require(token))
    return app


def _renderer(path: Path) -> PromptRenderer:
    try:
        return PromptRenderer.from_folder(path, DataConfig(source=CALLERS))
    except ConfigError:  # without a chat template; what else is wrong is so without one, too
        return PromptRenderer.from_folder(path, DataConfig(source=CALLERS, chat_template=False))


def _require(token: str) -> Callable[[Request, Next], Awaitable[Response]]:
    expected = f"Bearer {token}".encode()

    async def check(request: Request, call_next: Next) -> Response:
        if not hmac.compare_digest(request.headers.get("authorization", "").encode(), expected):
            return _problem(DENIED, "no token, or the wrong one; send `Authorization: Bearer TOKEN`")
        return await call_next(request)

    return check


def _not_understood(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return _problem(BAD, "; ".join(f"{'.'.join(map(str, one['loc'][1:])) or 'body'}: {one['msg']}" for one in error.errors()))


def _refused(_: Request, error: Exception) -> JSONResponse:
    return _problem(BROKEN if isinstance(error, EngineFailed) else BAD if isinstance(error, PoisonSample | ConfigError) else 500, str(error))


def _problem(code: int, text: str) -> JSONResponse:
    return JSONResponse({"error": {"message": text, "code": code}, "message": text}, status_code=code)
