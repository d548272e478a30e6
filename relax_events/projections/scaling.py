"""The elastic workers and the scale requests, folded from the control log."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from enum import StrEnum

from relax_events.events.parts import Command, WorkerState
from relax_events.events.types import Event, PolicyVersionPublished, RunCommanded, WorkerHeartbeat
from relax_events.projections.base import RunPhase
from relax_events.projections.scale_requests import Kind, ScaleRequest, Status

MAX_ENDED_KEPT = 100
"""Newest ended requests that are kept however old they are."""
KEPT_MICROS = 7 * 86_400 * 1_000_000
"""Age up to which every ended request is kept: a call repeated with its key gets the same
request."""


class DesiredState(StrEnum):
    """Whether a process of a worker is wanted."""

    PENDING = "planned"
    RUNNING = "wanted"
    LEAVING = "leaving"


class ExitReason(StrEnum):
    """How a worker exited."""

    DRAINED = "drained"
    KILLED = "killed"
    ABSENT = "absent"
    FAILED = "failed"
    """It failed by itself, and would fail again."""


@dataclass(frozen=True, slots=True)
class ElasticWorker:
    """A worker beyond the initial ones.

    Attributes:
        worker_id: Never used twice, so that no heartbeat is attributed to the wrong worker.
        role: Its role.
        url: The server that it attaches to; empty where it has its own engine.
        desired_state: Whether a process is wanted.
        drain_micros: Time limit of its drain when it leaves; None for the usual one.
    """

    worker_id: str
    role: str
    url: str
    desired_state: DesiredState = DesiredState.PENDING
    drain_micros: int | None = None

    def exit_command(self, departure: ExitReason, reason: str) -> RunCommanded:
        """Return the command that records its exit on the log."""
        arguments = {"left": departure.value}
        return RunCommanded(
            command=Command.SCALE,
            role=self.role,
            worker_id=self.worker_id,
            reason=reason,
            arguments=arguments,
        )


class ScaleState(RunPhase):
    """The elastic workers and the scale requests. An event may be applied twice."""

    def __init__(self) -> None:
        """Begin without any event."""
        super().__init__()
        self.requests: dict[str, ScaleRequest] = {}
        """By id, oldest first: all open ones, and the newest ended ones."""
        self.workers: dict[str, ElasticWorker] = {}
        """Elastic workers, by id, oldest first."""
        self.last_heartbeats: dict[str, WorkerHeartbeat] = {}
        self.num_ended: Counter[tuple[str, Kind, Status]] = Counter()
        """Number of ended requests, including dropped ones: by role, kind and status."""
        self.policy_version = -1
        self._last_index: dict[str, int] = {}

    def apply(self, event: Event) -> None:
        """Apply an event of the control log."""
        if isinstance(event, WorkerHeartbeat):
            self.last_heartbeats[event.worker_id] = event
        elif isinstance(event, PolicyVersionPublished):
            self.policy_version = max(self.policy_version, event.policy_version)
        elif isinstance(event, RunCommanded) and event.command is Command.SCALE:
            self._apply_scale_command(event)
        elif isinstance(event, RunCommanded):
            self.apply_command(event)

    def _apply_scale_command(self, event: RunCommanded) -> None:
        if event.worker_id is not None:
            self._apply_exit(event.worker_id, event)
        elif (request := self.requests.get(event.arguments.get("request", ""))) is not None:
            self._apply_status(request, request.with_status(event))
        elif (opened := ScaleRequest.from_command(event)) is not None:
            self._open(opened)

    def _open(self, request: ScaleRequest) -> None:
        """Add a request. A second open request of a model can only come from a second controller,
        and fails.
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
                self._set_desired_state(
                    worker_id, DesiredState.RUNNING if worker_id in coming else DesiredState.LEAVING
                )
        else:
            drain = 0 if after.force else after.timeout
            for worker_id in after.workers:
                self._set_desired_state(worker_id, DesiredState.LEAVING, drain_micros=drain)
        if not after.is_open:
            self._end(after)

    def _set_desired_state(
        self, worker_id: str, desired_state: DesiredState, *, drain_micros: int | None = None
    ) -> None:
        if (
            worker := self.workers.get(worker_id)
        ) is not None and worker.desired_state is not DesiredState.LEAVING:
            self.workers[worker_id] = replace(
                worker, desired_state=desired_state, drain_micros=drain_micros
            )

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
                request, failed=failed, exited_workers=request.exited_workers | {worker_id}
            )

    def _end(self, request: ScaleRequest) -> None:
        """Keep an ended request, and drop those that ended long ago."""
        self.requests[request.request_id] = request
        self.num_ended[request.role, request.kind, request.status] += 1
        over = [other for other in self.requests.values() if not other.is_open]
        for old in over[:-MAX_ENDED_KEPT]:
            if old.updated_at < request.updated_at - KEPT_MICROS:
                del self.requests[old.request_id]

    def open_request(self, model: str) -> ScaleRequest | None:
        """Return the open request of a model."""
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

    def heartbeat_since(self, worker_id: str, *, since: int) -> WorkerHeartbeat | None:
        """Return a worker's newest heartbeat after a time; an older one is from an earlier run of
        the same name.
        """
        heartbeat = self.last_heartbeats.get(worker_id)
        return heartbeat if heartbeat is not None and heartbeat.sent_at > since else None

    def is_serving(self, request: ScaleRequest, worker_id: str) -> bool:
        """Return whether a worker of a request takes work, with weights that are new enough."""
        heartbeat = self.heartbeat_since(worker_id, since=request.created_at)
        return (
            is_running(heartbeat)
            and heartbeat is not None
            and (heartbeat.role != "rollout" or heartbeat.policy_version >= request.policy_version)
        )


def is_running(heartbeat: WorkerHeartbeat | None) -> bool:
    """Return whether a worker has started and not begun to stop."""
    return heartbeat is not None and heartbeat.state in (WorkerState.IDLE, WorkerState.WORKING)
