"""The controller's HTTP API: Relax's routes for elastic rollout, with a token, idempotency keys and
dry runs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, TypeVar

from fastapi import APIRouter, Depends, FastAPI, Header, Path, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.security import HTTPBearer
from pydantic import BaseModel
from starlette.exceptions import HTTPException as PlainHTTPException

from relax_events import __version__
from relax_events.controller.api_client import CALLER_HEADER
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
)
from relax_events.controller.scaling_admission import RejectedError
from relax_events.controller.scaling_service import MainThreadTask, ScalingService
from relax_events.errors import BrokerError
from relax_events.http.guard import RequestGuard
from relax_events.http.identity import Identity, RequestHead, identify_by_token, read_identity
from relax_events.projections.scale_requests import Kind, ScaleCommand, Status
from relax_events.session.change_audit import FAILED, REFUSED, build_change

RESPONSE_SECONDS = 10.0
MAX_CALLS = 8
"""At once; further ones wait for their turn."""
SUMMARY = "Scale the workers of a run while it runs."
Result = TypeVar("Result")
Key = Annotated[
    str,
    Header(
        alias="Idempotency-Key",
        max_length=128,
        pattern=r"^[!-~]*$",
        description="A repeated call with the same key opens no second request.",
    ),
]
RequestId = Annotated[
    str,
    Path(
        min_length=1,
        max_length=128,
        pattern=r"^[A-Za-z0-9_-]+$",
        description="As returned by the call that opened it.",
    ),
]
ModelQuery = Annotated[str | None, Query(max_length=64, description="Only of this model.")]
StatusQuery = Annotated[Status | None, Query(description="Only in this status.")]
# The guard in front of the application checks the token; this documents it in the API's schema.
BEARER = HTTPBearer(
    auto_error=False,
    description=(
        "The token of the run: in `api-token` of its folder, unless scaling.token_file says "
        "otherwise."
    ),
)
ERRORS: tuple[tuple[int | str, str], ...] = (
    (400, "The call is malformed or can't be carried out; the message names the reason."),
    (401, "The token is missing or wrong."),
    (404, "The model or the request does not exist."),
    (409, "Another request for the model is open, or the key belongs to another call."),
    (503, "The controller or its broker is unavailable; retry with the same key."),
    ("default", "Any other error."),
)


def build_app(
    service: ScalingService, put: Callable[[MainThreadTask[object]], None], *, token: str, host: str
) -> RequestGuard:
    """Build the application.

    Args:
        service: Answers the calls, in the controller's thread.
        put: Hands a task to that thread.
        token: Required of every call, before its body is read.
        host: The address that the server listens on.
    """
    app = FastAPI(
        title="Relax Events", version=__version__, summary=SUMMARY, docs_url=None, redoc_url=None
    )
    app.include_router(_routes(_Caller(service, put)))
    app.add_exception_handler(RejectedError, _respond_rejected)
    app.add_exception_handler(RequestValidationError, _respond_invalid)
    app.add_exception_handler(PlainHTTPException, _respond_http_error)
    app.add_exception_handler(BrokerError, _respond_unavailable)
    app.add_exception_handler(TimeoutError, _respond_unavailable)
    caller = Identity(name="token", max_calls=MAX_CALLS)
    return RequestGuard(
        app,
        identify=identify_by_token(token, caller),
        problem=_problem,
        host=host,
        is_any_host=True,
    )


class _Caller:
    """Runs calls of the service in the controller's thread."""

    def __init__(
        self, service: ScalingService, put: Callable[[MainThreadTask[object]], None]
    ) -> None:
        self._service, self._put = service, put

    def call(self, work: Callable[[ScalingService], Result]) -> Result:
        """Return what the call returns.

        Raises:
            TimeoutError: The controller's thread did not run it within `RESPONSE_SECONDS`.
        """
        task = MainThreadTask(lambda: work(self._service))
        self._put(task)  # type: ignore[arg-type]
        return task.wait(RESPONSE_SECONDS)

    def change(
        self, request: Request, body: BaseModel | None, work: Callable[[ScalingService], Result]
    ) -> Result:
        """Return what a change returns, and have the log say who asked for it; a dry run is none.

        Raises:
            RejectedError: The change is refused.
            TimeoutError: As for `call`.
        """
        arguments = {} if body is None else body.model_dump(mode="json")
        if arguments.get("dry_run"):
            return self.call(work)
        build = partial(
            build_change,
            f"{request.method} {request.url.path}",
            arguments,
            identity=read_identity(request.scope).name,
            caller=request.headers.get(CALLER_HEADER, "unnamed"),
            address=request.client.host if request.client else "",
        )

        def audited(service: ScalingService) -> Result:
            try:
                result = work(service)
            except Exception as error:
                outcome = REFUSED if isinstance(error, RejectedError) else FAILED
                service.record(build(answer=str(error), outcome=outcome))
                raise
            service.record(build(answer=str(getattr(result, "message", ""))))
            return result

        return self.call(audited)


def _routes(caller: _Caller) -> APIRouter:
    routes = APIRouter(
        prefix="/rollout",
        dependencies=[Depends(BEARER)],
        responses={code: {"model": ApiResponse, "description": text} for code, text in ERRORS},
    )

    @routes.post("/scale_out")
    def scale_out(request: Request, body: ScaleOutBody, key: Key = "") -> ApiResponse:
        """Scale out to the given number of workers, or attach to SGLang servers."""
        command = _build_command(Kind.OUT, body, key)
        return caller.change(
            request, body, lambda service: service.scale(command, dry_run=body.dry_run)
        )

    @routes.post("/scale_out/{request_id}/cancel")
    def cancel_scale_out(request: Request, request_id: RequestId) -> ApiResponse:
        """Cancel an open scale-out request; the workers that it added are removed."""
        return caller.change(request, None, lambda service: service.cancel(request_id))

    @routes.post("/scale_out_cancel")
    def cancel_several(request: Request, body: CancelBody) -> CancelResult:
        """Cancel all matching scale-out requests."""
        return caller.change(
            request,
            body,
            lambda service: service.cancel_all(
                model=body.model_name, status=body.status_filter, dry_run=body.dry_run
            ),
        )

    @routes.post("/scale_in")
    def scale_in(request: Request, body: ScaleInBody, key: Key = "") -> ApiResponse:
        """Scale in to the given number of workers, or detach SGLang servers; the newest workers
        are removed first, the initial ones never.
        """
        command = _build_command(Kind.IN, body, key, force=body.force)
        return caller.change(
            request, body, lambda service: service.scale(command, dry_run=body.dry_run)
        )

    @routes.get("/engines")
    def engines(model_name: ModelQuery = None) -> Engines:
        """List the current workers."""
        return caller.call(lambda service: service.engines(model_name))

    for kind in Kind:
        _add_views(routes, caller, kind)
    return routes


def _add_views(routes: APIRouter, caller: _Caller, kind: Kind) -> None:
    """Add the routes that list and show the requests of a kind."""
    path = f"/scale_{kind.value}"

    @routes.get(path, name=f"list_scale_{kind.value}")
    def list_requests(model_name: ModelQuery = None, status: StatusQuery = None) -> RequestList:
        """List the requests: the open ones, and requests that ended within seven days or are
        among the newest 100.
        """
        return caller.call(lambda service: service.views(kind, model=model_name, status=status))

    @routes.get(f"{path}/{{request_id}}", name=f"show_scale_{kind.value}")
    def show_request(request_id: RequestId) -> RequestView:
        """Show a request."""
        return caller.call(lambda service: service.view(service.request(request_id, kind)))


def _build_command(kind: Kind, body: ScaleBody, key: str, *, force: bool = False) -> ScaleCommand:
    return ScaleCommand(
        kind=kind,
        model=body.model_name,
        target=body.num_replicas,
        urls=tuple(body.engine_urls),
        timeout_seconds=body.timeout_secs,
        force=force,
        key=key,
    )


def _problem(_: RequestHead, code: int, text: str) -> bytes:
    return ApiResponse(status="REJECTED", message=text).model_dump_json().encode()


def _respond(
    code: int, status: str, text: str, headers: dict[str, str] | None = None
) -> JSONResponse:
    return JSONResponse(
        ApiResponse(status=status, message=text).model_dump(), status_code=code, headers=headers
    )


def _respond_rejected(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RejectedError)
    return _respond(error.code, error.word, str(error))


def _respond_http_error(_: Request, error: Exception) -> JSONResponse:
    """Respond to an error of the framework: an unknown path or method, or a call without the
    token.
    """
    assert isinstance(error, PlainHTTPException)
    return _respond(error.status_code, "REJECTED", str(error.detail), dict(error.headers or {}))


def _respond_invalid(_: Request, error: Exception) -> JSONResponse:
    """Respond to a call with a malformed part; the given value is shown in ASCII."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    parameter = ".".join(str(part) for part in first["loc"][1:]) or "the body"
    got = (
        ""
        if first["type"] in ("missing", "json_invalid")
        else f", got {ascii(first.get('input'))[:80]}"
    )
    return _respond(
        400,
        "REJECTED",
        f"{ascii(parameter)[1:-1]}: {first['msg']}{got}".encode("ascii", "replace").decode(),
    )


def _respond_unavailable(_: Request, error: Exception) -> JSONResponse:
    text = (
        str(error)
        or f"the controller did not run the call within {RESPONSE_SECONDS:g} s; try again"
    )
    return _respond(503, "UNAVAILABLE", text, {"Retry-After": "5"})
