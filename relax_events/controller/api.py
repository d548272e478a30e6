"""The HTTP API of the controller: Relax's routes for elastic rollout, with a token, keys for
repeated calls, and rehearsals.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, FastAPI, Header, Path, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException as PlainHTTPException

from relax_events import __version__
from relax_events.controller.api_schemas import (
    ApiResponse,
    CancelBody,
    CancelResult,
    Engines,
    RequestList,
    RequestView,
    ScaleBody,
    ScaleInBody,
    ScaleOutBody,
    error_response,
)
from relax_events.controller.scaling_admission import RejectedError, ScaleCommand
from relax_events.controller.scaling_service import MainThreadTask, ScalingService
from relax_events.errors import BrokerError
from relax_events.http.guard import RequestGuard
from relax_events.projections.scale_requests import Kind, Status

RESPONSE_SECONDS = 10.0
SUMMARY = "Workers of a run come and go while it goes on."
Result = TypeVar("Result")
Key = Annotated[
    str,
    Header(
        alias="Idempotency-Key",
        max_length=128,
        pattern=r"^[!-~]*$",
        description="A call that is repeated with the same key makes no second request.",
    ),
]
RequestId = Annotated[
    str,
    Path(
        min_length=1,
        max_length=128,
        pattern=r"^[A-Za-z0-9_-]+$",
        description="As the call that made it was told.",
    ),
]
ModelQuery = Annotated[str | None, Query(max_length=64, description="Only of this model.")]
StatusQuery = Annotated[Status | None, Query(description="Only in this status.")]
# The guard before the application checks the token; this tells of it in the API's description.
BEARER = HTTPBearer(
    auto_error=False,
    description=(
        "The token of the run: in `api-token` of its folder, unless scaling.token_file says "
        "otherwise."
    ),
)
UNEXPECTED: dict[int | str, dict[str, Any]] = {
    "default": {"model": ApiResponse, "description": "Anything else that went wrong."}
}
UNAUTHORIZED = error_response(401, "No token, or the wrong one.")
UNAVAILABLE = error_response(
    503, "The controller or its broker does not answer now; try again, with the same key."
)
BAD_REQUEST = error_response(
    400, "The call is not one that can be understood, or can't be done; the message says why."
)
NOT_FOUND = error_response(404, "It names a model or a request that is not there.")
CONFLICT = error_response(
    409, "Another request for the model is not over, or the key belongs to another call."
)


def build_app(
    desk: ScalingService, put: Callable[[MainThreadTask[object]], None], *, token: str, host: str
) -> RequestGuard:
    """Make the application.

    Args:
        desk: Answers, in the thread that does what is put.
        put: Hands an errand to that thread.
        token: Without which no call is answered, and no body is read.
        host: What it listens on.
    """
    app = FastAPI(
        title="Relax Events", version=__version__, summary=SUMMARY, docs_url=None, redoc_url=None
    )
    app.include_router(_routes(desk, put))
    app.add_exception_handler(RejectedError, _respond_rejected)
    app.add_exception_handler(RequestValidationError, _respond_invalid)
    app.add_exception_handler(PlainHTTPException, _respond_http_error)
    app.add_exception_handler(BrokerError, _respond_unavailable)
    app.add_exception_handler(TimeoutError, _respond_unavailable)
    return RequestGuard(app, problem=_problem, host=host, token=token)


def _routes(desk: ScalingService, put: Callable[[MainThreadTask[object]], None]) -> APIRouter:
    routes = APIRouter(
        prefix="/rollout",
        dependencies=[Depends(BEARER)],
        responses={**UNAUTHORIZED, **UNAVAILABLE, **BAD_REQUEST, **UNEXPECTED},
    )

    def ask(work: Callable[[], Result]) -> Result:
        errand = MainThreadTask(work)
        put(errand)  # type: ignore[arg-type]
        return errand.wait(RESPONSE_SECONDS)

    def asked(kind: Kind, body: ScaleBody, key: str, *, force: bool = False) -> ScaleCommand:
        urls = tuple(body.engine_urls)
        return ScaleCommand(
            kind=kind,
            model=body.model_name,
            target=body.num_replicas,
            urls=urls,
            timeout_seconds=body.timeout_secs,
            force=force,
            key=key,
        )

    @routes.post("/scale_out", responses=NOT_FOUND | CONFLICT)
    def scale_out(body: ScaleOutBody, key: Key = "") -> ApiResponse:
        """Have as many workers as asked for, or attach to SGLang servers."""
        return ask(lambda: desk.scale(asked(Kind.OUT, body, key), dry_run=body.dry_run))

    @routes.get("/scale_out")
    def list_scale_out(model_name: ModelQuery = None, status: StatusQuery = None) -> RequestList:
        """Show requests for more workers: those that are open, and those that ended within seven
        days, or the newest 100.
        """
        return ask(lambda: desk.views(Kind.OUT, model=model_name, status=status))

    @routes.get("/scale_out/{request_id}", responses=NOT_FOUND)
    def show_scale_out(request_id: RequestId) -> RequestView:
        """Show a request for more workers."""
        return ask(lambda: desk.view(request_id, Kind.OUT))

    @routes.post("/scale_out/{request_id}/cancel", responses=NOT_FOUND)
    def cancel_scale_out(request_id: RequestId) -> ApiResponse:
        """Take a request back that is not over; whatever it has made goes."""
        return ask(lambda: desk.cancel(request_id))

    @routes.post("/scale_out_cancel")
    def cancel_several(body: CancelBody) -> CancelResult:
        """Take all requests back that match."""
        return ask(
            lambda: desk.cancel_all(
                model=body.model_name, status=body.status_filter, dry_run=body.dry_run
            )
        )

    @routes.get("/engines", responses=NOT_FOUND)
    def engines(model_name: ModelQuery = None) -> Engines:
        """Show the workers that are there."""
        return ask(lambda: desk.engines(model_name))

    @routes.post("/scale_in", responses=NOT_FOUND | CONFLICT)
    def scale_in(body: ScaleInBody, key: Key = "") -> ApiResponse:
        """Have no more workers than asked for, or let go of SGLang servers; the newest workers go
        first, those of the start stay.
        """
        return ask(
            lambda: desk.scale(asked(Kind.IN, body, key, force=body.force), dry_run=body.dry_run)
        )

    @routes.get("/scale_in")
    def list_scale_in(model_name: ModelQuery = None, status: StatusQuery = None) -> RequestList:
        """Show requests for fewer workers: those that are open, and those that ended within seven
        days, or the newest 100.
        """
        return ask(lambda: desk.views(Kind.IN, model=model_name, status=status))

    @routes.get("/scale_in/{request_id}", responses=NOT_FOUND)
    def show_scale_in(request_id: RequestId) -> RequestView:
        """Show a request for fewer workers."""
        return ask(lambda: desk.view(request_id, Kind.IN))

    return routes


def _problem(code: int, text: str) -> bytes:
    return ApiResponse(status="REJECTED", message=text).model_dump_json().encode()


def _respond(code: int, word: str, text: str, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse(
        ApiResponse(status=word, message=text).model_dump(), status_code=code, headers=headers
    )


def _respond_rejected(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RejectedError)
    return _respond(error.code, error.word, str(error))


def _respond_http_error(_: Request, error: Exception) -> JSONResponse:
    """Answer what the framework refuses, as a path or a method that there is not, or a call without
    the token.
    """
    assert isinstance(error, PlainHTTPException)
    return _respond(error.status_code, "REJECTED", str(error.detail), dict(error.headers or {}))


def _respond_invalid(_: Request, error: Exception) -> JSONResponse:
    """Answer a call whose parts are not of the form that they must have; what it brought is shown
    in ASCII, whatever it was.
    """
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"][1:]) or "the body"
    got = (
        ""
        if first["type"] in ("missing", "json_invalid")
        else f", got {ascii(first.get('input'))[:80]}"
    )
    return _respond(
        400,
        "REJECTED",
        f"{ascii(place)[1:-1]}: {first['msg']}{got}".encode("ascii", "replace").decode(),
    )


def _respond_unavailable(_: Request, error: Exception) -> JSONResponse:
    text = str(error) or f"the controller has not come to it within {RESPONSE_SECONDS:g} s; try again"
    return _respond(503, "UNAVAILABLE", text, {"Retry-After": "5"})
