"""What is to be done next about requests: pure functions over `ScaleState`.

    out   PENDING ─▶ CREATING | CONNECTING ─▶ HEALTH_CHECKING ─▶ WEIGHT_SYNCING ─▶ READY ─▶ ACTIVE | PARTIAL
                            │ a worker fails, the deadline, a cancellation
                            └──▶ REMOVING ─all it made is gone─▶ FAILED | CANCELLED
    in    PENDING ─▶ DRAINING ─all have said goodbye─▶ REMOVING ─all are gone─▶ COMPLETED

`relax run` reads the same log: it starts the workers of a request from CREATING on, ends those that
    leave, and tells of each that is gone.
"""

from __future__ import annotations

from relax_events.controller.scaling_bounds import Bounds
from relax_events.events.parts import WorkerState
from relax_events.events.types import RunCommanded
from relax_events.projections.scaling import MICROS, Kind, ScaleRequest, ScaleState, Status, is_up

CLIMB = (Status.CREATING, Status.HEALTH_CHECKING, Status.WEIGHT_SYNCING, Status.READY)


def decide(state: ScaleState, bounds: Bounds, *, now: int) -> list[RunCommanded]:
    """Return the next step of each request that has one; call it again once they are known.

    Args:
        state: What the log says. It must know a command from the moment on at which it is given.
        bounds: Of the run.
        now: Microseconds since the epoch.
    """
    if state.is_over:
        return []
    steps = [
        _next(state, bounds, request, now=now)
        for request in state.requests.values()
        if request.is_open
    ]
    return [step for step in steps if step is not None]


def _next(
    state: ScaleState, bounds: Bounds, request: ScaleRequest, *, now: int
) -> RunCommanded | None:
    if request.kind is Kind.IN:
        return _next_in(state, bounds, request, now=now)
    if request.status is Status.REMOVING:
        return _removed(bounds, request, now=now)
    return _next_out(state, bounds, request, now=now)


def _next_out(
    state: ScaleState, bounds: Bounds, request: ScaleRequest, *, now: int
) -> RunCommanded | None:
    """Take a request one status further, or give it up."""
    serving = [worker_id for worker_id in request.coming if state.is_serving(request, worker_id)]
    late = (
        [worker_id for worker_id in request.coming if worker_id not in serving]
        if now - request.created_at > request.timeout
        else []
    )
    if late and (not bounds.keeps_partial or not serving):
        return _given_up(
            request,
            f"{', '.join(late)} did not serve within {request.timeout / MICROS:g} s",
            now=now,
        )
    if late:
        return request.step(
            Status.PARTIAL,
            now=now,
            failed=late,
            error=f"not serving within {request.timeout / MICROS:g} s",
        )
    if request.failed and (not bounds.keeps_partial or not request.coming):
        worker_id, why = request.failed[0]
        return _given_up(request, f"{worker_id}: {why}", now=now)
    if request.status is Status.PENDING:
        return request.step(Status.CONNECTING if request.urls else Status.CREATING, now=now)
    if request.status is Status.READY:
        if request.failed:
            return request.step(
                Status.PARTIAL, now=now, error=f"{request.failed[0][0]}: {request.failed[0][1]}"
            )
        return request.step(Status.ACTIVE, now=now)
    height = min(_height(state, request, worker_id) for worker_id in request.coming)
    return request.step(CLIMB[request.rank], now=now) if height >= request.rank else None


def _height(state: ScaleState, request: ScaleRequest, worker_id: str) -> int:
    """Return how far a worker is: 0 unheard, 1 starting, 2 up, 3 serving with the weights that it
    needs.
    """
    beat = state.beat(worker_id, since=request.created_at)
    if beat is None:
        return 0
    return 3 if state.is_serving(request, worker_id) else 2 if is_up(beat) else 1


def _given_up(request: ScaleRequest, error: str, *, now: int) -> RunCommanded:
    return request.step(Status.REMOVING, now=now, outcome=Status.FAILED, error=error)


def _removed(bounds: Bounds, request: ScaleRequest, *, now: int) -> RunCommanded | None:
    """End a request that was taken back, once nothing is left of it."""
    outcome = request.outcome or Status.FAILED
    missing = sorted(set(request.workers) - request.left)
    if not missing:
        return request.step(
            outcome,
            now=now,
            reason=f"nothing is left of request {request.request_id}",
            error=request.error,
        )
    if now - request.updated_at > bounds.drain + bounds.confirm:
        return request.step(
            outcome,
            now=now,
            error=f"{request.error}; nobody has told of the end of {', '.join(missing)}".lstrip(
                "; "
            ),
        )
    return None


def _next_in(
    state: ScaleState, bounds: Bounds, request: ScaleRequest, *, now: int
) -> RunCommanded | None:
    missing = [worker_id for worker_id in request.workers if worker_id not in request.left]
    if request.status is Status.PENDING:
        return request.step(Status.DRAINING, now=now)
    if missing and now - request.created_at > request.timeout + bounds.confirm:
        return request.step(
            Status.FAILED, now=now, error=f"nobody has told of the end of {', '.join(missing)}"
        )
    if request.status is Status.DRAINING:
        are_done = all(_has_stopped(state, worker_id) for worker_id in missing)
        return request.step(Status.REMOVING, now=now) if are_done else None
    return None if missing else request.step(Status.COMPLETED, now=now)


def _has_stopped(state: ScaleState, worker_id: str) -> bool:
    beat = state.heard.get(worker_id)
    return beat is not None and beat.state is WorkerState.STOPPED
