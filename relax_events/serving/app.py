"""The application: SGLang's routes, OpenAI's and the token route over one engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from relax_events import __version__
from relax_events.config import DataConfig, EngineConfig, ModelConfig
from relax_events.data.rendering import PromptRenderer
from relax_events.engines.sglang.checkpoint import ModelFolder
from relax_events.engines.transformers.engine import TransformersEngine
from relax_events.errors import ConfigError, EngineFailed, PoisonSample, RelaxError
from relax_events.http.guard import GuardLimits, RequestGuard
from relax_events.http.identity import BodyBound, Identity, RequestHead, identify_by_token
from relax_events.serving.completions import CompletionService
from relax_events.serving.engine_runner import EngineRunner
from relax_events.serving.openai_routes import openai_routes
from relax_events.serving.sglang_routes import sglang_routes
from relax_events.serving.token_routes import RunnerSource, token_routes
from relax_events.weights import Weights

SUMMARY = "A model by engine `transformers`, behind SGLang's HTTP API."
CALLERS = "http"
"""Data source of the renderer: HTTP requests."""
BAD, BROKEN = 400, 503
BODY_SECONDS = 120.0
CALL_SECONDS = 4 * 3600.0
"""Deadline of a call: long samples on a CPU, behind others."""
MAX_CALLS = 4096
"""At once, of everyone with the token: every sample of an engine's that is under way is one."""
MAX_BYTES = 256 * 1024**2
"""Of their large bodies."""
TOKEN_BYTES = 16
"""Of a token of a prompt in JSON, as an id or as usual text."""
OPEN_PATHS = frozenset({"/health"})
"""Probes need no token here."""
TOKENIZER_FILE = "tokenizer_config.json"


def build_app(
    model: ModelConfig,
    engine: EngineConfig,
    *,
    model_name: str,
    is_incremental: bool = False,
    host: str = "127.0.0.1",
    token: str = "",
    weights_root: Path | None = None,
    adapters: Path | None = None,
) -> RequestGuard:
    """Load a model and build the application that serves it; the engine runs while the application
    does.

    Args:
        model: Folder, dtype and device, and whether experts are recorded.
        engine: Bounds on rows and context.
        model_name: For OpenAI's clients.
        is_incremental: Whether a streamed event has only new tokens, or all so far.
        host: Address to listen on.
        token: Required from every client; empty requires none.
        weights_root: Folder that weights may be loaded from. None allows any folder if a token is
            set, else none.
        adapters: Folder of adapters of `model.lora`, which are loaded into the model.
    Raises:
        ConfigError: The model can't be loaded or served.
    """
    recorded = ModelFolder.read(model.path, records_experts=True) if model.replays_routing else None
    runner = EngineRunner(_open_engine(model, engine, adapters))
    renderer = _renderer(_tokenizer_folder(model.path, adapters))
    service = CompletionService(runner, renderer)
    source = RunnerSource(
        runner,
        max_context_tokens=engine.max_context_tokens,
        stop_token_ids=renderer.stop_token_ids,
    )
    app = FastAPI(
        title="Relax Events",
        version=__version__,
        summary=SUMMARY,
        lifespan=_run_with(runner),
        docs_url=None,
        redoc_url=None,
    )
    app.include_router(
        sglang_routes(
            service,
            model_path=model.path.absolute(),
            recorded=recorded,
            is_incremental=is_incremental,
            may_load=_allow_folders(weights_root, has_token=bool(token)),
        )
    )
    app.include_router(
        openai_routes(service, model_name=model_name, max_context_tokens=engine.max_context_tokens)
    )
    app.include_router(
        token_routes(source, max_running=engine.max_running_samples, model_name=model_name)
    )
    app.add_exception_handler(RequestValidationError, _not_understood)
    app.add_exception_handler(RelaxError, _refused)
    caller = Identity(
        name="token",
        body=bound_body(engine, longest_token_bytes=renderer.longest_token_bytes),
        max_calls=MAX_CALLS,
        max_bytes=MAX_BYTES,
        max_connections=MAX_CALLS,
    )
    return RequestGuard(
        app,
        identify=identify_by_token(token, caller, open_paths=OPEN_PATHS),
        problem=_problem_body,
        host=host,
        limits=GuardLimits(body_seconds=BODY_SECONDS, call_seconds=CALL_SECONDS),
        is_any_host=bool(token),
    )


def bound_body(engine: EngineConfig, *, longest_token_bytes: int) -> BodyBound:
    """Return what a call may cost: prompts of all rows of the engine, as ids or as usual text, or
    one prompt of the longest tokens.
    """
    rows = engine.max_running_samples * engine.max_context_tokens
    one = BodyBound.of_text(engine.max_context_tokens, longest_token_bytes=longest_token_bytes)
    return BodyBound(num_bytes=one.num_bytes + rows * TOKEN_BYTES, num_values=one.num_values + rows)


def _open_engine(
    model: ModelConfig, engine: EngineConfig, adapters: Path | None
) -> TransformersEngine:
    """Load the model, and its adapters where there are some.

    Raises:
        ConfigError: The model or the adapters can't be loaded.
        WeightsError: The adapters don't fit the model.
    """
    opened = TransformersEngine(model.path, config=engine, model=model)
    if adapters is not None:
        opened.load_weights(Weights(0, opened.read_weights(adapters), b""))
    return opened


def _tokenizer_folder(model_path: Path, adapters: Path | None) -> Path:
    """Return the folder with the tokenizer: that of the adapters where they have their own."""
    has_own = adapters is not None and (adapters / TOKENIZER_FILE).is_file()
    return adapters if adapters is not None and has_own else model_path


def _run_with(runner: EngineRunner) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    """Return the application's lifespan, during which the engine runs."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        runner.open()
        yield
        runner.close()

    return lifespan


def _allow_folders(weights_root: Path | None, *, has_token: bool) -> Callable[[Path], bool]:
    """Return the rule that says whether weights may be loaded from a folder."""
    if weights_root is None:
        return lambda _: has_token
    return lambda path: path.resolve().is_relative_to(weights_root.resolve())


def _renderer(path: Path) -> PromptRenderer:
    try:
        return PromptRenderer.from_folder(path, DataConfig(source=CALLERS))
    except ConfigError:  # without a chat template; any other error repeats below
        return PromptRenderer.from_folder(path, DataConfig(source=CALLERS, chat_template=False))


def _not_understood(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return _problem(
        BAD,
        "; ".join(
            f"{'.'.join(map(str, one['loc'][1:])) or 'body'}: {one['msg']}"
            for one in error.errors()
        ),
    )


def _refused(_: Request, error: Exception) -> JSONResponse:
    return _problem(
        BROKEN
        if isinstance(error, EngineFailed)
        else BAD
        if isinstance(error, PoisonSample | ConfigError)
        else 500,
        str(error),
    )


def _problem_body(_: RequestHead, code: int, text: str) -> bytes:
    return bytes(_problem(code, text).body)


def _problem(code: int, text: str) -> JSONResponse:
    return JSONResponse(
        {"error": {"message": text, "code": code}, "message": text}, status_code=code
    )
