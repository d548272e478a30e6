"""The next step of each scale request: pure functions over `ScaleState`.

    out   PENDING ─▶ CREATING | CONNECTING ─▶ HEALTH_CHECKING ─▶ WEIGHT_SYNCING ─▶ READY
          ─▶ ACTIVE | PARTIAL
                            │ a worker fails, the deadline passes, the caller cancels
                            └──▶ REMOVING ─all its workers have exited─▶ FAILED | CANCELLED
    in    PENDING ─▶ DRAINING ─all have sent STOPPED─▶ REMOVING ─all have exited─▶ COMPLETED

`relax run` reads the same log: it starts a request's workers from CREATING on, ends workers that
leave, and reports each exit. Where an autoscaler outside starts and ends pods, it reads the desired
numbers as a metric and reports nothing: exits are then derived from heartbeats.
"""

from __future__ import annotations

from relax_events.controller.scaling_bounds import ScalingBounds
from relax_events.events.parts import WorkerState
from relax_events.events.types import RunCommanded
from relax_events.projections.scale_requests import MICROS, Kind, ScaleRequest, Status
from relax_events.projections.scaling import DesiredState, ExitReason, ScaleState, is_running

OUT_STAGES = (Status.CREATING, Status.HEALTH_CHECKING, Status.WEIGHT_SYNCING, Status.READY)


def decide(state: ScaleState, bounds: ScalingBounds, *, now: int) -> list[RunCommanded]:
    """Return the next command of each request that has one; apply them and call again.

    Args:
        state: The folded log. Commands must be applied to it as soon as they are sent.
        bounds: Of the run.
        now: Microseconds since the epoch.
    """
    if state.is_over:
        return []
    steps = [
        _next_command(state, bounds, request, now=now)
        for request in state.requests.values()
        if request.is_open
    ]
    return [step for step in steps if step is not None]


def _next_command(
    state: ScaleState, bounds: ScalingBounds, request: ScaleRequest, *, now: int
) -> RunCommanded | None:
    if request.kind is Kind.IN:
        return _next_in(state, bounds, request, now=now)
    if request.status is Status.REMOVING:
        return _finish_removal(bounds, request, now=now)
    return _next_out(state, bounds, request, now=now)


def _next_out(
    state: ScaleState, bounds: ScalingBounds, request: ScaleRequest, *, now: int
) -> RunCommanded | None:
    """Advance a request by one status, or abort it."""
    serving = [
        worker_id for worker_id in request.expected_workers if state.is_serving(request, worker_id)
    ]
    late = (
        [worker_id for worker_id in request.expected_workers if worker_id not in serving]
        if now - request.created_at > request.timeout
        else []
    )
    if late and (not bounds.keeps_partial or not serving):
        return _abort(
            request,
            f"{', '.join(late)} did not serve within {request.timeout / MICROS:g} s",
            now=now,
        )
    if late:
        return request.status_command(
            Status.PARTIAL,
            now=now,
            failed=late,
            error=f"not serving within {request.timeout / MICROS:g} s",
        )
    if request.failed and (not bounds.keeps_partial or not request.expected_workers):
        worker_id, why = request.failed[0]
        return _abort(request, f"{worker_id}: {why}", now=now)
    if request.status is Status.PENDING:
        return request.status_command(
            Status.CONNECTING if request.urls else Status.CREATING, now=now
        )
    if request.status is Status.READY:
        if request.failed:
            return request.status_command(
                Status.PARTIAL, now=now, error=f"{request.failed[0][0]}: {request.failed[0][1]}"
            )
        return request.status_command(Status.ACTIVE, now=now)
    height = min(_worker_stage(state, request, worker_id) for worker_id in request.expected_workers)
    return (
        request.status_command(OUT_STAGES[request.stage], now=now)
        if height >= request.stage
        else None
    )


def _worker_stage(state: ScaleState, request: ScaleRequest, worker_id: str) -> int:
    """Return a worker's progress: 0 no heartbeat, 1 starting, 2 running, 3 serving with the weights
    that it needs.
    """
    heartbeat = state.heartbeat_since(worker_id, since=request.created_at)
    if heartbeat is None:
        return 0
    return 3 if state.is_serving(request, worker_id) else 2 if is_running(heartbeat) else 1


def _abort(request: ScaleRequest, error: str, *, now: int) -> RunCommanded:
    return request.status_command(Status.REMOVING, now=now, outcome=Status.FAILED, error=error)


def _finish_removal(
    bounds: ScalingBounds, request: ScaleRequest, *, now: int
) -> RunCommanded | None:
    """End an aborted request once all its workers have exited."""
    outcome = request.outcome or Status.FAILED
    missing = sorted(set(request.workers) - request.exited_workers)
    if not missing:
        return request.status_command(
            outcome,
            now=now,
            reason=f"nothing is left of request {request.request_id}",
            error=request.error,
        )
    if now - request.updated_at > bounds.drain + bounds.confirm:
        return request.status_command(
            outcome,
            now=now,
            error=f"{request.error}; no exit was reported of {', '.join(missing)}".lstrip("; "),
        )
    return None


def _next_in(
    state: ScaleState, bounds: ScalingBounds, request: ScaleRequest, *, now: int
) -> RunCommanded | None:
    missing = [
        worker_id for worker_id in request.workers if worker_id not in request.exited_workers
    ]
    if request.status is Status.PENDING:
        return request.status_command(Status.DRAINING, now=now)
    if missing and now - request.created_at > request.timeout + bounds.confirm:
        return request.status_command(
            Status.FAILED, now=now, error=f"no exit was reported of {', '.join(missing)}"
        )
    if request.status is Status.DRAINING:
        are_done = all(_has_stopped(state, worker_id) for worker_id in missing)
        return request.status_command(Status.REMOVING, now=now) if are_done else None
    return None if missing else request.status_command(Status.COMPLETED, now=now)


def find_exits(state: ScaleState, bounds: ScalingBounds, *, now: int) -> list[RunCommanded]:
    """Return the exits of the leaving workers that an external autoscaler has ended.

    A worker without a heartbeat has not started, and its pod is no longer desired. Nothing else
    names a pod that was killed than its silence.
    """
    if not bounds.has_external_autoscaler:
        return []
    exits = []
    for worker in state.workers.values():
        heartbeat = state.last_heartbeats.get(worker.worker_id)
        if worker.desired_state is not DesiredState.LEAVING:
            continue
        if heartbeat is None:
            exits.append(worker.exit_command(ExitReason.ABSENT, "it had not started"))
        elif heartbeat.state is WorkerState.STOPPED:
            exits.append(worker.exit_command(ExitReason.DRAINED, "it drained"))
        elif now - heartbeat.sent_at > bounds.confirm:
            exits.append(worker.exit_command(ExitReason.KILLED, "it is silent, and did not drain"))
    return exits


def _has_stopped(state: ScaleState, worker_id: str) -> bool:
    heartbeat = state.last_heartbeats.get(worker_id)
    return heartbeat is not None and heartbeat.state is WorkerState.STOPPED
