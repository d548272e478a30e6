"""The elastic workers and the scale requests, folded from the control log."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from enum import StrEnum

from relax_events.events.parts import Command, WorkerState
from relax_events.events.types import Event, PolicyVersionPublished, RunCommanded, WorkerBeat
from relax_events.projections.scale_requests import Kind, ScaleRequest, Status

MAX_ENDED_KEPT = 100
"""Requests that are over and known however old they are."""
KEPT_MICROS = 7 * 86_400 * 1_000_000
"""For so long every request that is over is known: whoever repeats a call with its key within that
time is given the same request."""


class DesiredState(StrEnum):
    """Whether there shall be a process of a worker."""

    PENDING = "planned"
    RUNNING = "wanted"
    LEAVING = "leaving"


class ExitReason(StrEnum):
    """How a worker went."""

    DRAINED = "drained"
    KILLED = "killed"
    ABSENT = "absent"
    FAILED = "failed"
    """It ended by itself, and would again."""


@dataclass(frozen=True, slots=True)
class ElasticWorker:
    """A worker that the run did not start with.

    Attributes:
        worker_id: Never used twice, so that no beat of another is taken for its own.
        role: Whose it is.
        url: The server that it attaches to; empty where it has its own.
        standing: Whether there shall be a process.
        drain_micros: When it leaves, how long it may take; None for as long as any worker may.
    """

    worker_id: str
    role: str
    url: str
    desired_state: DesiredState = DesiredState.PENDING
    drain_micros: int | None = None

    def exit_command(self, departure: ExitReason, reason: str) -> RunCommanded:
        """Return the command that says on the log that it is gone."""
        arguments = {"left": departure.value}
        return RunCommanded(
            command=Command.SCALE,
            role=self.role,
            worker_id=self.worker_id,
            reason=reason,
            arguments=arguments,
        )


class ScaleState:
    """Feed it every event, in log order; it may hear one twice, and looks nowhere else."""

    def __init__(self) -> None:
        """Begin without having heard anything."""
        self.requests: dict[str, ScaleRequest] = {}
        """By id, oldest first: all that are open, and the newest of those that are over."""
        self.workers: dict[str, ElasticWorker] = {}
        """Who is there besides the workers of the start, or shall be; by id, oldest first."""
        self.last_heartbeats: dict[str, WorkerBeat] = {}
        self.num_ended: Counter[tuple[str, Kind, Status]] = Counter()
        """Requests that are over, those that are known no more among them: by role, kind and
        status."""
        self.policy_version = -1
        self.is_over = False
        self._last_index: dict[str, int] = {}

    def apply(self, event: Event) -> None:
        """Take in an event."""
        if isinstance(event, WorkerBeat):
            self.last_heartbeats[event.worker_id] = event
        elif isinstance(event, PolicyVersionPublished):
            self.policy_version = max(self.policy_version, event.policy_version)
        elif isinstance(event, RunCommanded) and event.command is Command.SCALE:
            self._apply_scale_command(event)
        elif (
            isinstance(event, RunCommanded)
            and event.role is None
            and event.command in (Command.STOP, Command.RESUME)
        ):
            self.is_over = event.command is Command.STOP

    def _apply_scale_command(self, event: RunCommanded) -> None:
        if event.worker_id is not None:
            self._apply_exit(event.worker_id, event)
        elif (known := self.requests.get(event.arguments.get("request", ""))) is not None:
            self._apply_status(known, known.with_status(event))
        elif (opened := ScaleRequest.from_command(event)) is not None:
            self._open(opened)

    def _open(self, request: ScaleRequest) -> None:
        """Know a request; one beside another of the same model can only be of two controllers at a
        time, and comes to nothing.
        """
        if (other := self.open_request(request.model)) is not None:
            refused = replace(
                request, status=Status.FAILED, error=f"request {other.request_id} came first"
            )
            self._end(refused)
            return
        self.requests[request.request_id] = request
        if request.kind is Kind.OUT:
            urls = request.urls or ("",) * len(request.workers)
            for worker_id, url in zip(request.workers, urls, strict=True):
                self.workers[worker_id] = ElasticWorker(worker_id, request.role, url)
                index = int(worker_id.rpartition("-")[2])
                self._last_index[request.role] = max(self._last_index.get(request.role, 0), index)

    def _apply_status(self, before: ScaleRequest, after: ScaleRequest) -> None:
        if after is before:
            return
        self.requests[after.request_id] = after
        if after.kind is Kind.OUT:
            is_kept = after.status not in (Status.REMOVING, Status.FAILED, Status.CANCELLED)
            coming = set(after.expected_workers) if is_kept else set()
            for worker_id in after.workers:
                self._set_desired_state(worker_id, DesiredState.RUNNING if worker_id in coming else DesiredState.LEAVING)
        else:
            drain = 0 if after.force else after.timeout
            for worker_id in after.workers:
                self._set_desired_state(worker_id, DesiredState.LEAVING, drain_micros=drain)
        if not after.is_open:
            self._end(after)

    def _set_desired_state(
        self, worker_id: str, standing: DesiredState, *, drain_micros: int | None = None
    ) -> None:
        if (
            worker := self.workers.get(worker_id)
        ) is not None and worker.desired_state is not DesiredState.LEAVING:
            self.workers[worker_id] = replace(worker, standing=standing, drain_micros=drain_micros)

    def _apply_exit(self, worker_id: str, event: RunCommanded) -> None:
        if self.workers.pop(worker_id, None) is None:
            return
        self.last_heartbeats.pop(worker_id, None)  # an id is never used twice
        for request in list(self.requests.values()):
            if not request.is_open or worker_id not in request.workers:
                continue
            has_failed = (
                request.kind is Kind.OUT
                and worker_id in request.expected_workers
                and event.arguments.get("left") == ExitReason.FAILED
            )
            failed = (*request.failed, (worker_id, event.reason)) if has_failed else request.failed
            self.requests[request.request_id] = replace(
                request, failed=failed, left=request.exited_workers | {worker_id}
            )

    def _end(self, request: ScaleRequest) -> None:
        """Keep a request that is over, and forget those that have been over for long."""
        self.requests[request.request_id] = request
        self.num_ended[request.role, request.kind, request.status] += 1
        over = [other for other in self.requests.values() if not other.is_open]
        for old in over[:-MAX_ENDED_KEPT]:
            if old.updated_at < request.updated_at - KEPT_MICROS:
                del self.requests[old.request_id]

    def open_request(self, model: str) -> ScaleRequest | None:
        """Return the request of a model for which something is still to be done."""
        return next(
            (
                request
                for request in self.requests.values()
                if request.is_open and request.model == model
            ),
            None,
        )

    def remaining_workers(self, role: str) -> list[ElasticWorker]:
        """Return a role's elastic workers that are not leaving, oldest first."""
        return [
            worker
            for worker in self.workers.values()
            if worker.role == role and worker.desired_state is not DesiredState.LEAVING
        ]

    def next_index(self, role: str, *, num_at_start: int) -> int:
        """Return the first index that no worker of the role ever had."""
        return max(self._last_index.get(role, 0), num_at_start - 1) + 1

    def heartbeat_since(self, worker_id: str, *, since: int) -> WorkerBeat | None:
        """Return a worker's newest beat after a time; an older one is another's, of a run of the
        same name.
        """
        beat = self.last_heartbeats.get(worker_id)
        return beat if beat is not None and beat.beat_at > since else None

    def is_serving(self, request: ScaleRequest, worker_id: str) -> bool:
        """Tell whether a worker that was asked for takes work, with weights that are new enough."""
        beat = self.heartbeat_since(worker_id, since=request.created_at)
        return (
            is_running(beat)
            and beat is not None
            and (beat.role != "rollout" or beat.policy_version >= request.policy_version)
        )


def is_running(beat: WorkerBeat | None) -> bool:
    """Tell whether a worker is past its start and not at its end."""
    return beat is not None and beat.state in (WorkerState.IDLE, WorkerState.WORKING)
