"""The elastic workers and the scale requests, folded from the control log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
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
        is_leaving: Whether no process of it is desired any more.
        drain_micros: Time limit of its drain when it leaves; None for the usual one.
    """

    worker_id: str
    role: str
    url: str
    is_leaving: bool = False
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
        self.num_dropped: Counter[tuple[str, Kind, Status]] = Counter()
        """Number of ended requests that are no longer kept: by role, kind and status."""
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
        elif (request := ScaleRequest.from_record(event)) is not None:
            if (earlier := self.requests.get(request.request_id)) is not None:
                self.requests[request.request_id] = ended = earlier.after(request)
                self._dismiss(ended.returned)
            elif request.outcome is None:
                self._open(request)

    def _open(self, request: ScaleRequest) -> None:
        """Add a request, and drop those that ended long ago. A second open request of a model can
        only come from a second controller, and fails.
        """
        other = self.open_request(request.role, now=request.created_at)
        if other is not None:
            error = f"request {other.request_id} came first"
            request = replace(request, outcome=Status.FAILED, workers=(), urls=(), error=error)
        elif request.kind is Kind.IN:
            self._dismiss(
                request.workers, drain_micros=0 if request.command.force else request.timeout
            )
        urls = request.urls or ("",) * len(request.workers)
        for worker_id, url in zip(request.workers, urls, strict=True):
            if request.kind is Kind.OUT:
                self.workers[worker_id] = ElasticWorker(worker_id, request.role, url)
                index = int(worker_id.rpartition("-")[2])
                self._last_index[request.role] = max(self._last_index.get(request.role, 0), index)
        self.requests[request.request_id] = request
        self._drop_old(now=request.created_at)

    def _dismiss(self, worker_ids: Iterable[str], *, drain_micros: int | None = None) -> None:
        """Let workers leave, unless they leave already."""
        for worker in map(self.workers.get, worker_ids):
            if worker is not None and not worker.is_leaving:
                self.workers[worker.worker_id] = replace(
                    worker, is_leaving=True, drain_micros=drain_micros
                )

    def _apply_exit(self, worker_id: str, event: RunCommanded) -> None:
        if self.workers.pop(worker_id, None) is None:
            return
        self.last_heartbeats.pop(worker_id, None)  # an id is never used twice
        failure = event.reason if event.arguments.get("left") == ExitReason.FAILED else ""
        for request in list(self.requests.values()):
            awaited = request.workers if request.is_undecided else request.leaving_workers
            if worker_id in awaited and worker_id not in request.exits:
                exits = {**request.exits, worker_id: (event.commanded_at, failure)}
                self.requests[request.request_id] = replace(
                    request, exits=exits, updated_at=event.commanded_at
                )

    def _drop_old(self, *, now: int) -> None:
        ended = [request for request in self.requests.values() if not request.is_open(now=now)]
        for old in ended[:-MAX_ENDED_KEPT]:
            if old.updated_at < now - KEPT_MICROS:
                del self.requests[old.request_id]
                self.num_dropped[old.role, old.kind, self.status(old, now=now)] += 1

    def open_request(self, role: str, *, now: int) -> ScaleRequest | None:
        """Return the open request of a role."""
        return next(
            (
                request
                for request in self.requests.values()
                if request.role == role and request.is_open(now=now)
            ),
            None,
        )

    def status(self, request: ScaleRequest, *, now: int) -> Status:
        """Return the status of a request: a label for what its workers report, by which nothing is
        decided. Until a request has ended, the label follows a worker that starts again.

            out   PENDING: no worker has reported; CREATING, CONNECTING: some have not;
                  HEALTH_CHECKING: some still start; WEIGHT_SYNCING: some have older weights;
                  READY: all serve; then the outcome that is on the log
            in    PENDING: no worker has reported that it drains; DRAINING: some have not stopped
            both  REMOVING: workers have stopped or are to leave, some exits are not reported; then
                  COMPLETED or the outcome
        """
        if request.is_undecided:
            return self._progress(request)
        if request.is_open(now=now):
            return self._departure(request)
        if request.outcome is not None:
            return request.outcome
        return Status.FAILED if request.overdue_workers(now=now) else Status.COMPLETED

    def _progress(self, request: ScaleRequest) -> Status:
        stages = [self._worker_stage(request, worker_id) for worker_id in request.expected_workers]
        if not any(stages):
            return Status.PENDING
        creating = Status.CONNECTING if request.urls else Status.CREATING
        return (creating, Status.HEALTH_CHECKING, Status.WEIGHT_SYNCING, Status.READY)[min(stages)]

    def _worker_stage(self, request: ScaleRequest, worker_id: str) -> int:
        """Return a worker's progress: 0 no heartbeat, 1 starting, 2 running, 3 serving with the
        weights that it needs. An older heartbeat is from an earlier run of the same name.
        """
        heartbeat = self.last_heartbeats.get(worker_id)
        if heartbeat is None or heartbeat.sent_at <= request.created_at:
            return 0
        if not is_running(heartbeat):
            return 1
        needs_version = heartbeat.role == "rollout"
        return 2 if needs_version and heartbeat.policy_version < request.policy_version else 3

    def _departure(self, request: ScaleRequest) -> Status:
        states = {
            heartbeat.state
            for worker_id in request.leaving_workers
            if worker_id not in request.exits
            and (heartbeat := self.last_heartbeats.get(worker_id)) is not None
        }
        if request.kind is Kind.OUT or states == {WorkerState.STOPPED}:
            return Status.REMOVING
        has_begun = request.exits or states & {WorkerState.DRAINING, WorkerState.STOPPED}
        return Status.DRAINING if has_begun else Status.PENDING

    def is_serving(self, request: ScaleRequest, worker_id: str) -> bool:
        """Return whether a worker of a request takes work, with weights that are new enough."""
        return self._worker_stage(request, worker_id) == 3

    def count_ended(self, *, now: int) -> Counter[tuple[str, Kind, Status]]:
        """Count the ended requests, dropped ones included: by role, kind and status."""
        return self.num_dropped + Counter(
            (request.role, request.kind, self.status(request, now=now))
            for request in list(self.requests.values())
            if not request.is_open(now=now)
        )

    def remaining_workers(self, role: str) -> list[ElasticWorker]:
        """Return a role's elastic workers that are not leaving, oldest first."""
        return [
            worker
            for worker in list(self.workers.values())
            if worker.role == role and not worker.is_leaving
        ]

    def next_index(self, role: str, *, num_at_start: int) -> int:
        """Return the first index that no worker of the role ever had."""
        return max(self._last_index.get(role, 0), num_at_start - 1) + 1


def is_running(heartbeat: WorkerHeartbeat | None) -> bool:
    """Return whether a worker has started and not begun to stop."""
    return heartbeat is not None and heartbeat.state in (WorkerState.IDLE, WorkerState.WORKING)
