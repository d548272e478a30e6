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
    Answer,
    CancelBody,
    Cancelled,
    Engines,
    RequestList,
    RequestView,
    ScaleBody,
    ScaleInBody,
    ScaleOutBody,
    problem,
)
from relax_events.controller.scaling_admission import Asked, Refused
from relax_events.controller.scaling_service import Errand, ScaleDesk
from relax_events.errors import BrokerError
from relax_events.http.guard import Guard
from relax_events.projections.scaling import Kind, Status

ANSWER_SECONDS = 10.0
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
OTHER: dict[int | str, dict[str, Any]] = {
    "default": {"model": Answer, "description": "Anything else that went wrong."}
}
DENIED = problem(401, "No token, or the wrong one.")
AWAY = problem(
    503, "The controller or its broker does not answer now; try again, with the same key."
)
BAD = problem(
    400, "The call is not one that can be understood, or can't be done; the message says why."
)
MISSING = problem(404, "It names a model or a request that is not there.")
BUSY = problem(
    409, "Another request for the model is not over, or the key belongs to another call."
)


def make_app(
    desk: ScaleDesk, put: Callable[[Errand[object]], None], *, token: str, host: str
) -> Guard:
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
    app.add_exception_handler(Refused, _refused)
    app.add_exception_handler(RequestValidationError, _not_understood)
    app.add_exception_handler(PlainHTTPException, _plain)
    app.add_exception_handler(BrokerError, _away)
    app.add_exception_handler(TimeoutError, _away)
    return Guard(app, problem=_problem, host=host, token=token)


def _routes(desk: ScaleDesk, put: Callable[[Errand[object]], None]) -> APIRouter:
    routes = APIRouter(
        prefix="/rollout",
        dependencies=[Depends(BEARER)],
        responses={**DENIED, **AWAY, **BAD, **OTHER},
    )

    def ask(work: Callable[[], Result]) -> Result:
        errand = Errand(work)
        put(errand)  # type: ignore[arg-type]
        return errand.wait(ANSWER_SECONDS)

    def asked(kind: Kind, body: ScaleBody, key: str, *, force: bool = False) -> Asked:
        urls = tuple(body.engine_urls)
        return Asked(
            kind=kind,
            model=body.model_name,
            target=body.num_replicas,
            urls=urls,
            timeout_seconds=body.timeout_secs,
            force=force,
            key=key,
        )

    @routes.post("/scale_out", responses=MISSING | BUSY)
    def scale_out(body: ScaleOutBody, key: Key = "") -> Answer:
        """Have as many workers as asked for, or attach to SGLang servers."""
        return ask(lambda: desk.scale(asked(Kind.OUT, body, key), dry_run=body.dry_run))

    @routes.get("/scale_out")
    def list_scale_out(model_name: ModelQuery = None, status: StatusQuery = None) -> RequestList:
        """Show requests for more workers: those that are open, and those that ended within seven
        days, or the newest 100.
        """
        return ask(lambda: desk.views(Kind.OUT, model=model_name, status=status))

    @routes.get("/scale_out/{request_id}", responses=MISSING)
    def show_scale_out(request_id: RequestId) -> RequestView:
        """Show a request for more workers."""
        return ask(lambda: desk.view(request_id, Kind.OUT))

    @routes.post("/scale_out/{request_id}/cancel", responses=MISSING)
    def cancel_scale_out(request_id: RequestId) -> Answer:
        """Take a request back that is not over; whatever it has made goes."""
        return ask(lambda: desk.cancel(request_id))

    @routes.post("/scale_out_cancel")
    def cancel_several(body: CancelBody) -> Cancelled:
        """Take all requests back that match."""
        return ask(
            lambda: desk.cancel_all(
                model=body.model_name, status=body.status_filter, dry_run=body.dry_run
            )
        )

    @routes.get("/engines", responses=MISSING)
    def engines(model_name: ModelQuery = None) -> Engines:
        """Show the workers that are there."""
        return ask(lambda: desk.engines(model_name))

    @routes.post("/scale_in", responses=MISSING | BUSY)
    def scale_in(body: ScaleInBody, key: Key = "") -> Answer:
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

    @routes.get("/scale_in/{request_id}", responses=MISSING)
    def show_scale_in(request_id: RequestId) -> RequestView:
        """Show a request for fewer workers."""
        return ask(lambda: desk.view(request_id, Kind.IN))

    return routes


def _problem(code: int, text: str) -> bytes:
    return Answer(status="REJECTED", message=text).model_dump_json().encode()


def _answer(code: int, word: str, text: str, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse(
        Answer(status=word, message=text).model_dump(), status_code=code, headers=headers
    )


def _refused(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, Refused)
    return _answer(error.code, error.word, str(error))


def _plain(_: Request, error: Exception) -> JSONResponse:
    """Answer what the framework refuses, as a path or a method that there is not, or a call without
    the token.
    """
    assert isinstance(error, PlainHTTPException)
    return _answer(error.status_code, "REJECTED", str(error.detail), dict(error.headers or {}))


def _not_understood(_: Request, error: Exception) -> JSONResponse:
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
    return _answer(
        400,
        "REJECTED",
        f"{ascii(place)[1:-1]}: {first['msg']}{got}".encode("ascii", "replace").decode(),
    )


def _away(_: Request, error: Exception) -> JSONResponse:
    text = str(error) or f"the controller has not come to it within {ANSWER_SECONDS:g} s; try again"
    return _answer(503, "UNAVAILABLE", text, {"Retry-After": "5"})
