"""The HTTP routes of the page: JSON for reading, server-sent events for news, POST for changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, MutableMapping
from html import escape
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlencode

import orjson
from fastapi import APIRouter, FastAPI, Header, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import RedirectResponse, Response, StreamingResponse

from relax_events.api.errors import AccessDenied, BrokerError, CheckFailed, ConfigError, RelaxError
from relax_events.api.http import (
    App,
    GuardLimits,
    Message,
    Receive,
    RequestGuard,
    RequestHead,
    Send,
    read_identity,
)
from relax_events.history.samples.filter import UNBOUNDED, parse_bounds
from relax_events.packages.dashboard import actions, details, views
from relax_events.packages.dashboard.access import (
    COOKIE_SECONDS,
    NO_LINK,
    READER,
    PageAccess,
    cookie_name,
)
from relax_events.packages.dashboard.answers import encode_json
from relax_events.packages.dashboard.registry import OpenRun, RunRegistry, find_runbook
from relax_events.packages.dashboard.sample_columns import SampleQuery

STATIC = Path(__file__).parent / "static"
CONTENT_TYPES = {
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".svg": "image/svg+xml",
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
NEWS_SECONDS = 1.0
PING_SECONDS = 10.0
MAX_PAGE = 200
BOUNDS = ("reward", "tokens", "staleness", "version", "step")
Text = Annotated[str, Query(max_length=128)]


CALL_SECONDS = 3600.0
"""Deadline of a call: a stream of news ends, and the browser opens another one."""


def build_app(registry: RunRegistry, access: PageAccess, *, host: str) -> App:
    """Build the application.

    Args:
        registry: The runs.
        access: Who may see the page.
        host: The address that the server listens on; requests for other hosts are refused.
    """
    app = FastAPI(title="Relax Events dashboard", docs_url=None, redoc_url=None, openapi_url=None)
    app.include_router(_run_routes(registry))
    app.include_router(_detail_routes(registry))
    app.include_router(_action_routes(registry))
    app.include_router(_page_routes(registry, access))
    app.add_exception_handler(RelaxError, _respond_error)
    app.add_exception_handler(RequestValidationError, _respond_invalid)

    guard = RequestGuard(
        app,
        identify=access.identify,
        problem=_problem,
        page=_problem_page,
        host=host,
        limits=GuardLimits(call_seconds=CALL_SECONDS),
        denied=NO_LINK,
    )
    return _with_headers(guard)


def _with_headers(app: App) -> App:
    """Return an application whose responses have the headers of a page that loads nothing else."""
    headers = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]

    async def answer(scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *headers]
            await send(message)

        await app(scope, receive, send_with_headers)

    return answer


def _json(value: object, status: int = 200) -> Response:
    return Response(encode_json(value), status_code=status, media_type="application/json")


def _problem(_: RequestHead, code: int, text: str) -> bytes:
    return orjson.dumps({"error": text})


def _problem_page(_: RequestHead, code: int, text: str) -> bytes:
    return f"<!doctype html><title>Relax Events</title><p>{escape(text)}</p>".encode()


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


def _exchange_link(request: Request, access: PageAccess, token: str) -> Response:
    """Give a browser a cookie for its link, and lead it to the address without the token."""
    cookie = access.redeem(token)
    if not cookie and read_identity(request.scope) is not READER:
        raise AccessDenied(NO_LINK)
    rest = [(name, value) for name, value in request.query_params.items() if name != "token"]
    answer = RedirectResponse(f"/?{urlencode(rest)}" if rest else "/", status_code=303)
    if cookie:
        answer.set_cookie(
            cookie_name(RequestHead.from_scope(request.scope)),
            cookie,
            max_age=COOKIE_SECONDS,
            httponly=True,
            samesite="strict",
            secure=request.url.scheme == "https",
        )
    return answer


def _run_routes(registry: RunRegistry) -> APIRouter:
    """Build the routes that answer from the reader's state."""
    routes = APIRouter(prefix="/api")

    @routes.get("/runs")
    def runs() -> Response:
        return _json({"runs": registry.list_runs(), "first": registry.first_run})

    @routes.get("/runs/{run_id}/summary")
    def summary(request: Request, run_id: str) -> Response:
        run = registry.open(run_id)
        return _shared(request, run, lambda: views.build_summary(run.reader))

    @routes.get("/runs/{run_id}/alarms")
    def alarms(request: Request, run_id: str) -> Response:
        run = registry.open(run_id)
        return _shared(
            request, run, lambda: {"alarms": views.list_alarms(run.reader, run.dead_letters.get())}
        )

    @routes.get("/runs/{run_id}/overview")
    def overview(request: Request, run_id: str) -> Response:
        run = registry.open(run_id)
        return _shared(request, run, lambda: views.build_overview(run.reader))

    @routes.get("/runs/{run_id}/fleet")
    def fleet(request: Request, run_id: str) -> Response:
        run = registry.open(run_id)
        return _shared(request, run, lambda: views.build_fleet(run.reader))

    @routes.get("/runs/{run_id}/timeline")
    def timeline(
        request: Request, run_id: str, seconds: Annotated[float, Query(ge=10, le=86_400)] = 120
    ) -> Response:
        run = registry.open(run_id)
        return _shared(request, run, lambda: views.build_timeline(run.reader, seconds=seconds))

    @routes.get("/runs/{run_id}/tails")
    def tails(request: Request, run_id: str) -> Response:
        run = registry.open(run_id)
        return _shared(request, run, lambda: views.build_tails(run.reader))

    @routes.get("/runs/{run_id}/config")
    def config(run_id: str, other: Text = "") -> Response:
        mine = _described(registry.open(run_id))
        theirs = _described(registry.open(other)) if other else {}
        return _json({"config": mine, "other": theirs})

    @routes.get("/runs/{run_id}/samples")
    def samples(request: Request, run_id: str) -> Response:
        run, query = registry.open(run_id), parse_query(dict(request.query_params))
        return _shared(request, run, lambda: views.build_samples(run.reader.table, query))

    @routes.get("/runs/{run_id}/events")
    def events(request: Request, run_id: str) -> StreamingResponse:
        run = registry.open(run_id)
        headers = {"X-Accel-Buffering": "no"}
        return StreamingResponse(
            _news(request, run), media_type="text/event-stream", headers=headers
        )

    return routes


def _shared(request: Request, run: OpenRun, compute: Callable[[], object]) -> Response:
    """Answer from the reader's state, once for all pages; a page that has the answer gets 304."""
    question = f"{request.url.path}?{request.url.query}"
    answer = run.answers.get(question, compute)
    if request.headers.get("if-none-match") == answer.tag:
        return Response(status_code=304, headers={"ETag": answer.tag})
    return Response(answer.body, media_type="application/json", headers={"ETag": answer.tag})


async def _news(request: Request, run: OpenRun) -> AsyncIterator[bytes]:
    """Yield an event when the log has something new, at most one a second, and a ping when it has
    not for a while.
    """
    last = b""
    while not await request.is_disconnected():
        run.keep_open()
        num_rings = run.bell.num_rings
        answer = await asyncio.to_thread(
            run.answers.get, "news", lambda: views.build_summary(run.reader)
        )
        if answer.body != last:
            last = answer.body
            yield b"event: news\ndata: " + last + b"\n\n"
        else:
            yield b": ping\n\n"
        await asyncio.sleep(NEWS_SECONDS)
        await run.bell.wait(num_heard=num_rings, timeout_seconds=PING_SECONDS)


def _described(run: OpenRun) -> dict[str, Any]:
    described = run.reader.fold.description
    settings: dict[str, Any] = orjson.loads(described.config) if described else {}
    return settings


def parse_query(values: dict[str, str]) -> SampleQuery:
    """Parse the query of the sample list: `reward=0.5..`, `outcome=trained`, `sort=-reward`.

    Raises:
        ConfigError: A value is malformed; the text names it.
    """
    bounds = {
        name: span
        for name in BOUNDS
        if (span := parse_bounds(values.get(name, ""), flag=name)) != UNBOUNDED
    }
    sort = values.get("sort", "-time")
    return SampleQuery(
        bounds=bounds,
        outcome=values.get("outcome", ""),
        finish=values.get("finish", ""),
        source=values.get("source", ""),
        worker=values.get("worker", ""),
        group=values.get("group", ""),
        sort=sort.removeprefix("-"),
        descending=sort.startswith("-"),
        first=_number(values, "first", default=0, high=10**9),
        count=_number(values, "count", default=50, high=MAX_PAGE),
    )


def _number(values: dict[str, str], name: str, *, default: int, high: int) -> int:
    text = values.get(name, "")
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
        numbers = [int(row) for row in rows.split(",") if row.isdecimal()][:MAX_PAGE]
        texts_by_row = run.reader.texts.find(numbers)
        missing = [row for row in numbers if row not in texts_by_row]
        if missing:
            with details.open_log(run.config) as log:
                texts_by_row |= details.read_texts(log, run.reader.table, missing)
        return _json(texts_by_row)

    @routes.get("/sample")
    def sample(run_id: str, row: int = -1, sample_id: Text = "") -> Response:
        run = registry.open(run_id)
        table = run.reader.table
        number = table.find(sample_id) if sample_id else row
        with details.open_log(run.config) as log:
            return _json(details.read_sample(log, table, number))

    @routes.get("/media")
    def media(run_id: str, row: int, number: int, frame: int = 0) -> Response:
        run = registry.open(run_id)
        with details.open_log(run.config) as log:
            kind, data = details.render_media(log, run.reader.table, row, number, frame)
        return Response(data, media_type=kind)

    @routes.get("/lineage")
    def lineage(
        run_id: str, sample_id: Text = "", version: Annotated[int, Query(ge=-1)] = -1
    ) -> Response:
        run = registry.open(run_id)
        newest = run.reader.table.newest_version
        chosen = newest if version < 0 else version
        with details.open_log(run.config) as log:
            return _json(
                {"sample": details.read_lineage_of_sample(log, sample_id)}
                if sample_id
                else {"version": details.read_lineage_of_version(log, chosen), "newest": newest}
            )

    @routes.get("/lag")
    def lag(run_id: str) -> Response:
        return _json({"rows": registry.open(run_id).lag.get()})

    @routes.get("/dead-letters")
    def dead_letters(run_id: str) -> Response:
        return _json({"rows": registry.open(run_id).dead_letters.get()})

    @routes.get("/dead-letters/{name}")
    def dead_letter(run_id: str, name: str) -> Response:
        with details.open_log(registry.open(run_id).config) as log:
            return _json(details.show_dead_letter(log, name))

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
        try:
            return _json(actions.resolve_dead_letters(run.config, action))
        finally:
            run.dead_letters.forget()

    return routes


def _page_routes(registry: RunRegistry, access: PageAccess) -> APIRouter:
    """Build the routes of the page's own files, kept in memory, and of the alerts' pages."""
    routes = APIRouter()
    files = {
        path.relative_to(STATIC).as_posix(): (
            path.read_bytes(),
            CONTENT_TYPES.get(path.suffix, "text/plain"),
        )
        for path in STATIC.rglob("*")
        if path.is_file()
    }

    def respond(name: str) -> Response:
        content, media_type = files[name]
        return Response(content, media_type=media_type)

    @routes.get("/")
    async def index(request: Request, token: Text = "") -> Response:
        return _exchange_link(request, access, token) if token else respond("index.html")

    @routes.get("/api/runbooks/{name}")
    def runbook(name: str) -> Response:
        return _json({"text": find_runbook(name)})

    @routes.get("/static/{path:path}")
    async def static(path: str) -> Response:
        if path not in files:
            return _json({"error": f"there is no file {path[:100]!r}"}, 404)
        return respond(path)

    return routes
