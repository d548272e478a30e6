"""Answers scale commands and advances requests. API threads hand their calls to the controller's
thread, which alone changes the state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Generic, TypeVar

from relax_events.controller import scaling_admission as admission
from relax_events.controller.api_schemas import (
    ApiResponse,
    CancelResult,
    EngineGroup,
    Engines,
    EngineView,
    ModelView,
    RequestList,
    RequestView,
    Skipped,
)
from relax_events.controller.scaling_admission import NotFoundError, RejectedError
from relax_events.controller.scaling_bounds import ScalingBounds, WorkerPool
from relax_events.controller.scaling_decisions import decide
from relax_events.events.parts import now_micros
from relax_events.events.types import ChangeRequested, RunCommanded
from relax_events.projections.scale_requests import Kind, ScaleCommand, ScaleRequest, Status
from relax_events.projections.scaling import ScaleState

Result = TypeVar("Result")
RecordChange = Callable[[ChangeRequested], None]
"""Writes to the log who asked for a change; a failure is logged."""
EmitCommands = Callable[[Sequence[RunCommanded]], None]
"""Writes commands to the log and applies them to the state."""


class MainThreadTask(Generic[Result]):
    """A call that the controller's thread runs while another thread waits for its result."""

    def __init__(self, work: Callable[[], Result]) -> None:
        self._work = work
        self._future: Future[Result] = Future()

    def run(self) -> None:
        """Run the call, unless its caller no longer waits."""
        if self._future.set_running_or_notify_cancel():
            try:
                self._future.set_result(self._work())
            except Exception as error:  # raised in the thread that waits
                self._future.set_exception(error)

    def wait(self, timeout_seconds: float) -> Result:
        """Wait for the result; a call that has not begun by then is dropped.

        Raises:
            TimeoutError: The controller's thread did not run it in time.
        """
        try:
            return self._future.result(timeout_seconds)
        finally:
            self._future.cancel()


class ScalingService:
    """Answers scale commands and advances requests. Used by one thread."""

    def __init__(
        self, state: ScaleState, bounds: ScalingBounds, give: EmitCommands, *, record: RecordChange
    ) -> None:
        """Start with a state.

        Args:
            state: Folded from the log.
            bounds: What scaling may do.
            give: Writes commands and applies them.
            record: Writes who asked for a change.
        """
        self.state, self.bounds = state, bounds
        self._emit, self.record = give, record

    def reconcile(self) -> None:
        """Write what is decided for the requests by now."""
        while commands := decide(self.state, self.bounds, now=now_micros()):
            self._emit(commands)

    def scale(self, command: ScaleCommand, *, dry_run: bool) -> ApiResponse:
        """Open a request, unless there is nothing to do or this is a dry run.

        Raises:
            RejectedError: The command can't be carried out; the text names the reason.
        """
        decision = admission.admit(self.state, self.bounds, command, now=now_micros())
        request = decision.request
        if request is None:
            return ApiResponse(status="NOOP", message=decision.text)
        names = list(request.workers)
        if dry_run:
            return ApiResponse(
                status="DRY_RUN",
                message=f"{decision.text}; nothing was done",
                selected_engines=names,
            )
        if decision.is_new:
            self._emit([request.to_record(reason=decision.text)])
        return ApiResponse(
            request_id=request.request_id,
            status=self.state.status(request, now=now_micros()),
            message=decision.text,
            selected_engines=names,
        )

    def request(self, request_id: str, kind: Kind) -> ScaleRequest:
        """Return a request.

        Raises:
            NotFoundError: There is none of that id and kind.
        """
        request = self.state.requests.get(request_id)
        if request is None or request.kind is not kind:
            raise NotFoundError(
                f"there is no request {request_id[:80]!a} among those that are kept"
            )
        return request

    def view(self, request: ScaleRequest) -> RequestView:
        """Describe a request."""
        now = now_micros()
        return RequestView.from_request(request, self.state.status(request, now=now), now=now)

    def views(self, kind: Kind, *, model: str | None, status: Status | None) -> RequestList:
        """Describe the requests of a kind, of one model or in one status."""
        views = [self.view(request) for request in self._select(kind, model, status)]
        return RequestList(requests=views, total_count=len(views))

    def _select(self, kind: Kind, model: str | None, status: Status | None) -> list[ScaleRequest]:
        now = now_micros()
        return [
            request
            for request in self.state.requests.values()
            if request.kind is kind and model in (None, request.command.model)
            if status in (None, self.state.status(request, now=now))
        ]

    def cancel(self, request_id: str) -> ApiResponse:
        """Cancel a request and remove the workers that it has added.

        Raises:
            RejectedError, NotFoundError: It can't be cancelled, or there is none.
        """
        request = self.request(request_id, Kind.OUT)
        self._emit([admission.cancel(self.state, self.bounds, request, now=now_micros())])
        return ApiResponse(
            request_id=request_id,
            status=Status.REMOVING,
            message=f"cancelled: {', '.join(request.workers)}",
            selected_engines=list(request.workers),
        )

    def cancel_all(
        self, *, model: str | None, status: Status | None, dry_run: bool
    ) -> CancelResult:
        """Cancel every matching request that can be cancelled."""
        requests = self._select(Kind.OUT, model, status)
        result = CancelResult(
            total_count=len(requests),
            dry_run=dry_run,
            filters={"model_name": model, "status_filter": status},
        )
        for request in requests:
            try:
                command = admission.cancel(self.state, self.bounds, request, now=now_micros())
            except RejectedError as rejection:
                result.skipped.append(Skipped(request_id=request.request_id, reason=str(rejection)))
                continue
            result.succeeded.append(request.request_id)
            if not dry_run:
                self._emit([command])
        return result

    def engines(self, model: str | None) -> Engines:
        """Describe the current workers.

        Raises:
            NotFoundError: The run has no such model.
        """
        pools = self.bounds.pools.values()
        chosen = pools if model is None else [admission.find_pool(self.bounds, model)]
        models = {pool.model: self._model(pool) for pool in chosen}
        return Engines(
            models=models, total_engines=sum(view.total_engines for view in models.values())
        )

    def _model(self, pool: WorkerPool) -> ModelView:
        added = [worker for worker in self.state.workers.values() if worker.role == pool.role]
        engines = [
            [
                self._engine(f"{pool.role}-{index}", is_protected=True)
                for index in range(pool.num_at_start)
            ],
            [self._engine(worker.worker_id, url=worker.url or None) for worker in added],
        ]
        groups = [
            EngineGroup(
                group_index=group_index,
                worker_type=pool.role,
                num_gpus_per_engine=1,
                num_new_engines=len(added) * group_index,
                engines=views,
            )
            for group_index, views in enumerate(engines)
            if views
        ]
        return ModelView(engine_groups=groups, total_engines=sum(map(len, engines)))

    def _engine(
        self, worker_id: str, *, url: str | None = None, is_protected: bool = False
    ) -> EngineView:
        view = EngineView(
            rank=int(worker_id.rpartition("-")[2]),
            engine_id=worker_id,
            url=url,
            is_protected=is_protected,
        )
        if (heartbeat := self.state.last_heartbeats.get(worker_id)) is None:
            return view
        has_version = heartbeat.policy_version >= 0
        return view.model_copy(
            update={
                "status": heartbeat.state.value,
                "pid": heartbeat.pid,
                "node_id": heartbeat.host,
                "policy_version": heartbeat.policy_version if has_version else None,
            }
        )
