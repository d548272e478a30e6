"""Request and response bodies of the API: Relax's fields, with `dry_run` for both directions."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from relax_events.projections.scale_requests import (
    DEFAULT_MODEL,
    MICROS,
    Kind,
    ScaleRequest,
    Status,
)

MAX_COUNT = 1_000_000
MAX_SECONDS = 86_400.0
MAX_URLS = 256
Model = Annotated[
    str,
    Field(
        min_length=1,
        max_length=64,
        description="`default` means the rollout workers; others have a role's name.",
    ),
]
Timeout = Annotated[
    float | None,
    Field(
        gt=0,
        le=MAX_SECONDS,
        allow_inf_nan=False,
        description="Time limit of the request in seconds; null for the run file's.",
    ),
]


class Body(BaseModel):
    """A request body; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class ScaleBody(Body):
    """The wanted number of workers, the initial ones included, or the servers."""

    model_name: Model = DEFAULT_MODEL
    num_replicas: Annotated[
        int,
        Field(
            ge=0,
            le=MAX_COUNT,
            description="Wanted number of workers in all; 0 when engine_urls are given.",
        ),
    ] = 0
    engine_urls: Annotated[
        list[Annotated[str, Field(max_length=2048)]],
        Field(max_length=MAX_URLS, description="SGLang servers."),
    ] = []
    timeout_secs: Timeout = None
    dry_run: Annotated[bool, Field(description="Report what would be done, and do nothing.")] = (
        False
    )


class ScaleOutBody(ScaleBody):
    """A scale-out."""


class ScaleInBody(ScaleBody):
    """A scale-in: the newest workers are removed, the initial ones stay."""

    force: Annotated[
        bool,
        Field(description="Don't drain the workers; others generate their prompt groups again."),
    ] = False


class CancelBody(Body):
    """Which requests to cancel."""

    model_name: Annotated[Model | None, Field(description="Only of this model.")] = None
    status_filter: Annotated[Status | None, Field(description="Only in this status.")] = None
    dry_run: Annotated[
        bool, Field(description="Report what would be cancelled, and cancel nothing.")
    ] = False


class ApiResponse(BaseModel):
    """The result of a call."""

    request_id: str = ""
    status: str
    message: str
    selected_engines: list[str] = []


class Skipped(BaseModel):
    """A request that was not cancelled."""

    request_id: str
    reason: str


class CancelResult(BaseModel):
    """The result of a call that cancels several requests."""

    succeeded: list[str] = []
    skipped: list[Skipped] = []
    total_count: int = 0
    dry_run: bool
    filters: dict[str, str | None]


class RequestView(BaseModel):
    """The state of a request. Times are in seconds since the epoch."""

    model_config = ConfigDict(protected_namespaces=())

    request_id: str
    kind: Kind
    status: Status
    model_name: str
    num_replicas: int
    engine_urls: list[str]
    engine_ids: list[str]
    failed_engines: list[str]
    selected_engines: list[str]
    removed_engines: list[str]
    force: bool
    dry_run: bool = False
    timeout_secs: float
    created_at: float
    updated_at: float
    error_message: str | None
    weight_version: int | None

    @classmethod
    def from_request(cls, request: ScaleRequest, status: Status, *, now: int) -> RequestView:
        """Describe a request, as it is at a time."""
        is_out, workers = request.kind is Kind.OUT, list(request.workers)
        return cls(
            request_id=request.request_id,
            kind=request.kind,
            status=status,
            model_name=request.command.model,
            num_replicas=request.target,
            engine_urls=list(request.urls),
            engine_ids=workers if is_out else [],
            failed_engines=list(request.failed),
            selected_engines=[] if is_out else workers,
            removed_engines=[worker_id for worker_id in workers if worker_id in request.exits],
            force=request.command.force,
            timeout_secs=request.timeout / MICROS,
            created_at=request.created_at / MICROS,
            updated_at=request.updated_at / MICROS,
            error_message=request.describe_error(now=now) or None,
            weight_version=request.policy_version if request.policy_version >= 0 else None,
        )


class RequestList(BaseModel):
    """Requests, oldest first."""

    requests: list[RequestView]
    total_count: int


class EngineView(BaseModel):
    """A worker."""

    rank: int
    engine_id: str
    status: str = "waiting"
    url: str | None = None
    pid: int | None = None
    node_id: str | None = None
    policy_version: int | None = None
    is_protected: bool


class EngineGroup(BaseModel):
    """The initial workers of a model, or the added ones."""

    group_index: int
    worker_type: str
    num_gpus_per_engine: int
    num_new_engines: int
    engines: list[EngineView]


class ModelView(BaseModel):
    """The workers of a model. There is no router: they share a queue."""

    router_ip: str | None = None
    router_port: int | None = None
    engine_groups: list[EngineGroup]
    total_engines: int


class Engines(BaseModel):
    """All workers of the elastic roles, the initial ones included."""

    models: dict[str, ModelView]
    total_engines: int
