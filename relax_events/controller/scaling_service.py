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
from relax_events.controller.scaling_admission import NotFoundError, RejectedError, ScaleCommand
from relax_events.controller.scaling_bounds import ScalingBounds, WorkerPool
from relax_events.controller.scaling_decisions import decide, find_exits
from relax_events.events.parts import now_micros
from relax_events.events.types import ChangeRequested, RunCommanded
from relax_events.projections.scale_requests import Kind, ScaleRequest, Status
from relax_events.projections.scaling import DesiredState, ScaleState

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
        """Advance every request as far as possible."""
        while steps := [
            *decide(self.state, self.bounds, now=now_micros()),
            *find_exits(self.state, self.bounds, now=now_micros()),
        ]:
            self._emit(steps)

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
            self._emit([request.open_command(reason=decision.text)])
        return ApiResponse(
            request_id=request.request_id,
            status=request.status,
            message=decision.text,
            selected_engines=names,
        )

    def request(self, request_id: str, kind: Kind | None = None) -> ScaleRequest:
        """Return a request.

        Raises:
            NotFoundError: There is none of that id and kind.
        """
        request = self.state.requests.get(request_id)
        if request is None or kind not in (None, request.kind):
            raise NotFoundError(
                f"there is no request {request_id[:80]!a} among those that are kept"
            )
        return request

    def view(self, request_id: str, kind: Kind) -> RequestView:
        """Describe a request; raises as `request`."""
        return RequestView.from_request(self.request(request_id, kind))

    def views(self, kind: Kind, *, model: str | None, status: Status | None) -> RequestList:
        """Describe the requests of a kind."""
        shown = [
            RequestView.from_request(request)
            for request in self._matching(model, status)
            if request.kind is kind
        ]
        return RequestList(requests=shown, total_count=len(shown))

    def cancel(self, request_id: str) -> ApiResponse:
        """Cancel a request and remove the workers that it has added.

        Raises:
            RejectedError, NotFoundError: It can't be cancelled, or there is none.
        """
        request = admission.require_cancellable(self.request(request_id, Kind.OUT))
        self._cancel(request)
        names = list(request.workers)
        return ApiResponse(
            request_id=request_id,
            status=Status.REMOVING,
            message=f"cancelled: {', '.join(names)}",
            selected_engines=names,
        )

    def cancel_all(
        self, *, model: str | None, status: Status | None, dry_run: bool
    ) -> CancelResult:
        """Cancel every matching request that can be cancelled."""
        succeeded, skipped = [], []
        requests = [
            request for request in self._matching(model, status) if request.kind is Kind.OUT
        ]
        for request in requests:
            try:
                admission.require_cancellable(request)
            except RejectedError as rejection:
                skipped.append(Skipped(request_id=request.request_id, reason=str(rejection)))
                continue
            succeeded.append(request.request_id)
            if not dry_run:
                self._cancel(request)
        filters = {"model_name": model, "status_filter": status}
        return CancelResult(
            succeeded=succeeded,
            skipped=skipped,
            total_count=len(requests),
            dry_run=dry_run,
            filters=filters,
        )

    def _cancel(self, request: ScaleRequest) -> None:
        self._emit(
            [
                request.status_command(
                    Status.REMOVING,
                    now=now_micros(),
                    outcome=Status.CANCELLED,
                    reason="cancelled by a caller",
                )
            ]
        )

    def _matching(self, model: str | None, status: Status | None) -> list[ScaleRequest]:
        requests = self.state.requests.values()
        return [
            request
            for request in requests
            if model in (None, request.model) and status in (None, request.status)
        ]

    def engines(self, model: str | None) -> Engines:
        """Describe the current workers.

        Raises:
            NotFoundError: The run has no such model.
        """
        pools = self.bounds.pools
        if model is not None and model not in pools:
            raise NotFoundError(
                f"this run has no model {model[:80]!a}; there is {', '.join(pools) or 'none'}"
            )
        shown = {name: self._model(pool) for name, pool in pools.items() if model in (None, name)}
        return Engines(
            models=shown, total_engines=sum(view.total_engines for view in shown.values())
        )

    def _model(self, pool: WorkerPool) -> ModelView:
        elastic = [
            worker
            for worker in self.state.workers.values()
            if worker.role == pool.role and worker.desired_state is not DesiredState.PENDING
        ]
        first = [
            self._engine(f"{pool.role}-{index}", is_protected=True)
            for index in range(pool.num_at_start)
        ]
        added = [self._engine(worker.worker_id, url=worker.url or None) for worker in elastic]
        groups = [
            EngineGroup(
                group_index=group_index,
                worker_type=pool.role,
                num_gpus_per_engine=1,
                num_new_engines=len(added) * group_index,
                engines=engines,
            )
            for group_index, engines in enumerate((first, added))
            if engines
        ]
        return ModelView(engine_groups=groups, total_engines=len(first) + len(added))

    def _engine(
        self, worker_id: str, *, url: str | None = None, is_protected: bool = False
    ) -> EngineView:
        heartbeat = self.state.last_heartbeats.get(worker_id)
        return EngineView(
            rank=int(worker_id.rpartition("-")[2]),
            engine_id=worker_id,
            status=heartbeat.state.value if heartbeat else "waiting",
            url=url,
            pid=heartbeat.pid if heartbeat else None,
            node_id=heartbeat.host if heartbeat else None,
            policy_version=heartbeat.policy_version
            if heartbeat and heartbeat.policy_version >= 0
            else None,
            is_protected=is_protected,
        )
