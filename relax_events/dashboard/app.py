"""The HTTP routes of the page: JSON for reading, server-sent events for news, POST for changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, FastAPI, Header, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, Response, StreamingResponse

from relax_events.dashboard import actions, details, views
from relax_events.dashboard.alarms import list_alarms
from relax_events.dashboard.registry import OpenRun, RunRegistry, find_runbook
from relax_events.dashboard.sample_columns import SampleQuery
from relax_events.errors import (
    AccessDenied,
    BrokerError,
    CheckFailed,
    ConfigError,
    RelaxError,
)
from relax_events.history.samples.filter import UNBOUNDED, parse_bounds
from relax_events.http.server import RequestGuard

STATIC = Path(__file__).parent / "static"
CONTENT_TYPES = {
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".txt": "text/plain; charset=utf-8",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; media-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
NEWS_SECONDS = 0.5
PING_SECONDS = 10.0
MAX_PAGE = 200
BOUNDS = ("reward", "tokens", "staleness", "version", "step")
Text = Annotated[str, Query(max_length=128)]


def build_app(registry: RunRegistry, *, host: str) -> RequestGuard:
    """Build the application.

    Args:
        registry: The runs.
        host: The address that the server listens on; requests for other hosts are refused.
    """
    app = FastAPI(title="Relax Events dashboard", docs_url=None, redoc_url=None, openapi_url=None)
    app.include_router(_run_routes(registry))
    app.include_router(_detail_routes(registry))
    app.include_router(_action_routes(registry))
    app.include_router(_page_routes(registry))
    app.add_exception_handler(RelaxError, _respond_error)
    app.add_exception_handler(RequestValidationError, _respond_invalid)

    @app.middleware("http")
    async def add_headers(request: Request, call_next: Callable[..., Any]) -> Response:
        response: Response = await call_next(request)
        response.headers.update(HEADERS)
        return response

    return RequestGuard(app, problem=_problem, host=host)


def _json(value: object, status: int = 200) -> Response:
    content = orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS, default=str)
    return Response(content, status_code=status, media_type="application/json")


def _problem(code: int, text: str) -> bytes:
    return orjson.dumps({"error": text})


def _respond_error(_: Request, error: Exception) -> Response:
    status = 500
    for kind, code in (
        (AccessDenied, 401),
        (BrokerError, 503),
        (CheckFailed, 409),
        (ConfigError, 400),
    ):
        if isinstance(error, kind):
            status = code
            break
    return _json({"error": str(error)}, status)


def _respond_invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    name = ".".join(str(part) for part in first["loc"][1:]) or "the body"
    return _json({"error": f"{name}: {first['msg']}"}, 400)


def _run_routes(registry: RunRegistry) -> APIRouter:
    """Build the routes that answer from the reader's state."""
    routes = APIRouter(prefix="/api")

    @routes.get("/runs")
    def runs() -> Response:
        return _json({"runs": registry.list_runs(), "first": registry.first_run})

    @routes.get("/runs/{run_id}/summary")
    def summary(run_id: str) -> Response:
        return _json(views.build_summary(registry.open(run_id).reader))

    @routes.get("/runs/{run_id}/alarms")
    def alarms(run_id: str) -> Response:
        run = registry.open(run_id)
        return _json({"alarms": list_alarms(run.reader, run.dead_letters())})

    @routes.get("/runs/{run_id}/overview")
    def overview(run_id: str) -> Response:
        return _json(views.build_overview(registry.open(run_id).reader))

    @routes.get("/runs/{run_id}/fleet")
    def fleet(run_id: str) -> Response:
        return _json(views.build_fleet(registry.open(run_id).reader))

    @routes.get("/runs/{run_id}/timeline")
    def timeline(run_id: str, seconds: Annotated[float, Query(ge=10, le=86_400)] = 120) -> Response:
        return _json(views.build_timeline(registry.open(run_id).reader, seconds=seconds))

    @routes.get("/runs/{run_id}/tails")
    def tails(run_id: str) -> Response:
        return _json(views.build_tails(registry.open(run_id).reader))

    @routes.get("/runs/{run_id}/config")
    def config(run_id: str, other: Text = "") -> Response:
        mine = _described(registry.open(run_id))
        theirs = _described(registry.open(other)) if other else {}
        return _json({"config": mine, "other": theirs})

    @routes.get("/runs/{run_id}/samples")
    def samples(request: Request, run_id: str) -> Response:
        table = registry.open(run_id).reader.table
        page = table.select(parse_query(dict(request.query_params)))
        rows = table.describe(page.rows)
        return _json(
            {
                "rows": rows,
                "num_matching": page.num_matching,
                "num_samples": len(table),
                "choices": views.build_choices(table),
            }
        )

    @routes.get("/runs/{run_id}/events")
    def events(request: Request, run_id: str) -> StreamingResponse:
        run = registry.open(run_id)
        headers = {"X-Accel-Buffering": "no"}
        return StreamingResponse(
            _news(request, run), media_type="text/event-stream", headers=headers
        )

    return routes


async def _news(request: Request, run: OpenRun) -> AsyncIterator[bytes]:
    """Yield an event when the log has something new, and a ping when it has not for a while."""
    last, silent = -1, 0.0
    while not await request.is_disconnected():
        revision = run.reader.status.revision
        if revision != last:
            last, silent = revision, 0.0
            summary = await asyncio.to_thread(views.build_summary, run.reader)
            yield b"event: news\ndata: " + orjson.dumps(summary) + b"\n\n"
        elif silent >= PING_SECONDS:
            silent = 0.0
            yield b": ping\n\n"
        run.used_at = max(run.used_at, asyncio.get_running_loop().time())
        await asyncio.sleep(NEWS_SECONDS)
        silent += NEWS_SECONDS


def _described(run: OpenRun) -> dict[str, Any]:
    described = run.reader.fold.state.description
    found: dict[str, Any] = orjson.loads(described.config) if described else {}
    return found


def parse_query(given: dict[str, str]) -> SampleQuery:
    """Parse the query of the sample list: `reward=0.5..`, `outcome=trained`, `sort=-reward`.

    Raises:
        ConfigError: A value is malformed; the text names it.
    """
    bounds = {
        name: span
        for name in BOUNDS
        if (span := parse_bounds(given.get(name, ""), flag=name)) != UNBOUNDED
    }
    sort = given.get("sort", "-time")
    return SampleQuery(
        bounds=bounds,
        outcome=given.get("outcome", ""),
        finish=given.get("finish", ""),
        source=given.get("source", ""),
        worker=given.get("worker", ""),
        group=given.get("group", ""),
        sort=sort.removeprefix("-"),
        descending=sort.startswith("-"),
        first=_number(given, "first", default=0, high=10**9),
        count=_number(given, "count", default=50, high=MAX_PAGE),
    )


def _number(given: dict[str, str], name: str, *, default: int, high: int) -> int:
    text = given.get(name, "")
    value = int(text) if text.isdecimal() and len(text) < 12 else (default if not text else -1)
    if not 0 <= value <= high:
        raise ConfigError(f"{name} must be a whole number from 0 to {high}, got {text[:32]!r}")
    return value


def _detail_routes(registry: RunRegistry) -> APIRouter:
    """Build the routes that read the log on demand."""
    routes = APIRouter(prefix="/api/runs/{run_id}")

    @routes.get("/texts")
    def texts(run_id: str, rows: Annotated[str, Query(max_length=4096)]) -> Response:
        run = registry.open(run_id)
        wanted = [int(row) for row in rows.split(",") if row.isdecimal()][:MAX_PAGE]
        return _json(details.read_texts(run.config, run.reader.table, wanted))

    @routes.get("/sample")
    def sample(run_id: str, row: int = -1, sample_id: Text = "") -> Response:
        run = registry.open(run_id)
        table = run.reader.table
        number = table.find(sample_id) if sample_id else row
        return _json(details.read_sample(run.config, table, number))

    @routes.get("/media")
    def media(run_id: str, row: int, number: int, frame: int = 0) -> Response:
        run = registry.open(run_id)
        kind, data = details.render_media(run.config, run.reader.table, row, number, frame)
        return Response(data, media_type=kind)

    @routes.get("/lineage")
    def lineage(
        run_id: str, sample_id: Text = "", version: Annotated[int, Query(ge=-1)] = -1
    ) -> Response:
        run = registry.open(run_id)
        if sample_id:
            return _json({"sample": details.read_lineage_of_sample(run.config, sample_id)})
        newest = run.reader.table.newest_version
        wanted = newest if version < 0 else version
        return _json(
            {
                "version": details.read_lineage_of_version(run.config, wanted),
                "newest": newest,
            }
        )

    @routes.get("/lag")
    def lag(run_id: str) -> Response:
        return _json({"rows": registry.open(run_id).lag.read()})

    @routes.get("/dead-letters")
    def dead_letters(run_id: str) -> Response:
        return _json({"rows": registry.open(run_id).dead_letters(at_most_old=2.0)})

    @routes.get("/dead-letters/{name}")
    def dead_letter(run_id: str, name: str) -> Response:
        return _json(details.show_dead_letter(registry.open(run_id).config, name))

    return routes


def _action_routes(registry: RunRegistry) -> APIRouter:
    """Build the routes that change something; each checks the token first."""
    routes = APIRouter(prefix="/api/runs/{run_id}")

    @routes.post("/scale")
    def scale(
        run_id: str,
        action: actions.ScaleAction,
        authorization: Annotated[str, Header(max_length=512)] = "",
    ) -> Response:
        config = registry.open(run_id).config
        token = actions.require_token(config, authorization)
        return _json(actions.scale(config, action, token=token))

    @routes.post("/dead-letters")
    def resolve(
        run_id: str,
        action: actions.DeadLetterAction,
        authorization: Annotated[str, Header(max_length=512)] = "",
    ) -> Response:
        run = registry.open(run_id)
        actions.require_token(run.config, authorization)
        return _json(actions.resolve_dead_letters(run.config, action))

    return routes


def _page_routes(registry: RunRegistry) -> APIRouter:
    """Build the routes of the page's own files, and of the alerts' pages."""
    routes = APIRouter()
    files = {
        f"/{path.relative_to(STATIC).as_posix()}": path
        for path in STATIC.rglob("*")
        if path.is_file()
    }

    @routes.get("/")
    def index() -> Response:
        return FileResponse(STATIC / "index.html", media_type=CONTENT_TYPES[".html"])

    @routes.get("/api/runbooks/{name}")
    def runbook(name: str) -> Response:
        return _json({"text": find_runbook(name)})

    @routes.get("/static/{path:path}")
    def static(path: str) -> Response:
        file = files.get(f"/{path}")
        if file is None:
            return _json({"error": f"there is no file {path[:100]!r}"}, 404)
        return FileResponse(file, media_type=CONTENT_TYPES.get(file.suffix, "text/plain"))

    return routes
