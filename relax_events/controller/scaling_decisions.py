"""What the controller decides for scale requests: pure functions over `ScaleState`.

The log holds how many workers of each role are desired: a request raises or lowers the number by
its record, and its workers follow. `relax run` reads the log, starts and ends processes, and
reports exits. Where an autoscaler outside starts and ends pods, it reads the desired numbers as a
metric and reports nothing: exits are then derived from heartbeats. So one decision is left: whether
the added workers stay, once they serve, or leave again, since some failed or are late.
"""

from __future__ import annotations

from relax_events.controller.scaling_bounds import ScalingBounds
from relax_events.events.parts import WorkerState
from relax_events.events.types import RunCommanded
from relax_events.projections.scale_requests import MICROS, ScaleRequest, Status
from relax_events.projections.scaling import ExitReason, ScaleState


def decide(state: ScaleState, bounds: ScalingBounds, *, now: int) -> list[RunCommanded]:
    """Return the records that end requests, and those of exits that no `relax run` reports.

    Args:
        state: The folded log. Commands must be applied to it as soon as they are sent.
        bounds: Of the run.
        now: Microseconds since the epoch.
    """
    if state.is_over:
        return []
    ends = [
        _find_end(state, bounds, request, now=now)
        for request in state.requests.values()
        if request.is_undecided
    ]
    return [end for end in ends if end is not None] + find_exits(state, bounds, now=now)


def _find_end(
    state: ScaleState, bounds: ScalingBounds, request: ScaleRequest, *, now: int
) -> RunCommanded | None:
    """Return the record that ends an addition of workers; None while they may still serve."""
    absent = [
        worker_id
        for worker_id in request.expected_workers
        if not state.is_serving(request, worker_id)
    ]
    error = "; ".join(f"{worker_id}: {reason}" for worker_id, reason in request.failed.items())
    if absent and now - request.created_at > request.timeout:
        error = f"{', '.join(absent)} did not serve within {request.timeout / MICROS:g} s"
    elif absent and (not error or bounds.keeps_partial):
        return None
    if not error:
        return request.end(Status.ACTIVE, now=now).to_record()
    is_partial = bounds.keeps_partial and len(absent) < len(request.expected_workers)
    ended = request.end(
        Status.PARTIAL if is_partial else Status.FAILED,
        now=now,
        exit_deadline=now + bounds.drain + bounds.confirm,
        returned=absent if is_partial else request.workers,
        error=error,
    )
    return ended.to_record()


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
        if not worker.is_leaving:
            continue
        if heartbeat is None:
            exits.append(worker.exit_command(ExitReason.ABSENT, "it had not started"))
        elif heartbeat.state is WorkerState.STOPPED:
            exits.append(worker.exit_command(ExitReason.DRAINED, "it drained"))
        elif now - heartbeat.sent_at > bounds.confirm:
            exits.append(worker.exit_command(ExitReason.KILLED, "it is silent, and did not drain"))
    return exits
