"""What is asked for when workers are to come or go, and how it stands on the control log: as
commands of kind `scale`.

What the control log says of workers that come and go: a fold, the same for whoever reads it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from relax_events.events.parts import Command, WorkerState
from relax_events.events.types import Event, PolicyVersionPublished, RunCommanded, WorkerBeat

MICROS = 1_000_000


class Kind(StrEnum):
    """Whether workers come or go."""

    OUT = "out"
    IN = "in"


class Status(StrEnum):
    """Where a request is; those of Relax."""

    PENDING = "PENDING"
    CREATING = "CREATING"
    CONNECTING = "CONNECTING"
    HEALTH_CHECKING = "HEALTH_CHECKING"
    WEIGHT_SYNCING = "WEIGHT_SYNCING"
    READY = "READY"
    ACTIVE = "ACTIVE"
    PARTIAL = "PARTIAL"
    DRAINING = "DRAINING"
    REMOVING = "REMOVING"
    COMPLETED = "COMPLETED"
    CANCELLED = "CANCELLED"
    FAILED = "FAILED"


ORDER = {
    Kind.OUT: (
        {Status.PENDING},
        {Status.CREATING, Status.CONNECTING},
        {Status.HEALTH_CHECKING},
        {Status.WEIGHT_SYNCING},
        {Status.READY},
        {Status.REMOVING},
        {Status.ACTIVE, Status.PARTIAL, Status.CANCELLED, Status.FAILED},
    ),
    Kind.IN: (
        {Status.PENDING},
        {Status.DRAINING},
        {Status.REMOVING},
        {Status.COMPLETED, Status.FAILED},
    ),
}
"""A request only goes forward; the last of each are final."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleRequest:
    """Workers of a role that are to come or to go.

    Attributes:
        request_id: Names it.
        model: As who asked calls the role.
        target: Workers of the role that there shall be, those of the start among them.
        workers: Who comes or goes, by worker id.
        urls: Of the servers that the coming workers attach to, one each; empty for workers of their
            own.
        timeout: Microseconds until those that come must serve, or until those that go are killed.
        force: Those that go are killed at once.
        policy_version: Those that come serve once they have this one; -1 where there is none yet.
        key: By which a call that is repeated is known again.
        digest: Of what was asked for under the key.
        failed: Workers that did not come up, with the reason.
        left: Workers that are gone.
        outcome: How the request ends when what it made is removed.
        error: Why it did not do what was asked for.
    """

    request_id: str
    kind: Kind
    model: str
    role: str
    target: int
    workers: tuple[str, ...]
    urls: tuple[str, ...] = ()
    timeout: int
    force: bool = False
    policy_version: int = -1
    key: str = ""
    digest: str = ""
    status: Status = Status.PENDING
    failed: tuple[tuple[str, str], ...] = ()
    left: frozenset[str] = frozenset()
    outcome: Status | None = None
    error: str = ""
    created_at: int
    updated_at: int

    @property
    def rank(self) -> int:
        """How far it is."""
        return rank(self.kind, self.status)

    @property
    def is_open(self) -> bool:
        """Whether something is still to be done for it."""
        return self.rank < len(ORDER[self.kind]) - 1

    @property
    def coming(self) -> tuple[str, ...]:
        """The workers that may still come up, or have."""
        failed = {worker_id for worker_id, _ in self.failed}
        return tuple(worker_id for worker_id in self.workers if worker_id not in failed)

    def opening(self, *, reason: str) -> RunCommanded:
        """Return the command that puts the request on the log."""
        arguments = {
            "request": self.request_id,
            "kind": self.kind.value,
            "model": self.model,
            "target": str(self.target),
            "workers": " ".join(self.workers),
            "urls": " ".join(self.urls),
            "timeout": str(self.timeout),
            "force": str(self.force),
            "policy_version": str(self.policy_version),
            "key": self.key,
            "digest": self.digest,
        }
        return RunCommanded(
            command=Command.SCALE,
            role=self.role,
            reason=reason,
            arguments=arguments,
            commanded_at=self.created_at,
        )

    def step(
        self,
        status: Status,
        *,
        now: int,
        reason: str = "",
        outcome: Status | None = None,
        failed: Iterable[str] = (),
        error: str = "",
    ) -> RunCommanded:
        """Return the command that takes it on to a status; see the attributes. `failed` are further
        workers, for the reason `error`.
        """
        arguments = {
            "request": self.request_id,
            "status": status.value,
            "failed": " ".join(failed),
            "error": error,
        }
        if outcome is not None:
            arguments["outcome"] = outcome.value
        told = reason or error or f"request {self.request_id} is {status.value}"
        return RunCommanded(
            command=Command.SCALE,
            role=self.role,
            reason=told,
            arguments=arguments,
            commanded_at=now,
        )

    @classmethod
    def opened(cls, event: RunCommanded) -> ScaleRequest | None:
        """Read a request off the command that opened it; None for what is none."""
        given = event.arguments
        try:
            request = cls(
                request_id=given["request"],
                kind=Kind(given["kind"]),
                model=given["model"],
                role=event.role or "",
                target=int(given["target"]),
                workers=tuple(given["workers"].split()),
                urls=tuple(given["urls"].split()),
                timeout=int(given["timeout"]),
                force=given["force"] == str(True),
                policy_version=int(given["policy_version"]),
                key=given["key"],
                digest=given["digest"],
                created_at=event.commanded_at,
                updated_at=event.commanded_at,
            )
        except (KeyError, ValueError):
            return None
        are_named = all(
            re.fullmatch(rf"{re.escape(request.role)}-[0-9]+", worker_id)
            for worker_id in request.workers
        )
        return (
            request
            if request.workers and are_named and len(request.urls) in (0, len(request.workers))
            else None
        )

    def advanced(self, event: RunCommanded) -> ScaleRequest:
        """Return the request after a step; the same where the step is one back, as when it is read
        a second time.
        """
        given = event.arguments
        try:
            status = Status(given["status"])
            outcome = Status(given["outcome"]) if "outcome" in given else self.outcome
            is_forward = rank(self.kind, status) > self.rank
        except (KeyError, ValueError):
            return self
        if not is_forward:
            return self
        error = given.get("error", "")
        failed = (
            *self.failed,
            *((worker_id, error) for worker_id in given.get("failed", "").split()),
        )
        return replace(
            self,
            status=status,
            outcome=outcome,
            failed=failed,
            error=error or self.error,
            updated_at=event.commanded_at,
        )


def rank(kind: Kind, status: Status) -> int:
    """Return how far a request of a kind is in a status.

    Raises:
        ValueError: Requests of this kind are never in it.
    """
    for place, statuses in enumerate(ORDER[kind]):
        if status in statuses:
            return place
    raise ValueError(f"{kind} has no status {status}")


NUM_KEPT = 100
"""Requests that are over and known however old they are."""
KEPT_MICROS = 7 * 86_400 * 1_000_000
"""For so long every request that is over is known: whoever repeats a call with its key within that
time is given the same request."""


class Standing(StrEnum):
    """Whether there shall be a process of a worker."""

    PLANNED = "planned"
    WANTED = "wanted"
    LEAVING = "leaving"


class Departure(StrEnum):
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
    standing: Standing = Standing.PLANNED
    drain_micros: int | None = None

    def gone(self, departure: Departure, reason: str) -> RunCommanded:
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
        self.heard: dict[str, WorkerBeat] = {}
        self.ended: Counter[tuple[str, Kind, Status]] = Counter()
        """Requests that are over, those that are known no more among them: by role, kind and
        status."""
        self.policy_version = -1
        self.is_over = False
        self._last_index: dict[str, int] = {}

    def note(self, event: Event) -> None:
        """Take in an event."""
        if isinstance(event, WorkerBeat):
            self.heard[event.worker_id] = event
        elif isinstance(event, PolicyVersionPublished):
            self.policy_version = max(self.policy_version, event.policy_version)
        elif isinstance(event, RunCommanded) and event.command is Command.SCALE:
            self._note_scaling(event)
        elif (
            isinstance(event, RunCommanded)
            and event.role is None
            and event.command in (Command.STOP, Command.RESUME)
        ):
            self.is_over = event.command is Command.STOP

    def _note_scaling(self, event: RunCommanded) -> None:
        if event.worker_id is not None:
            self._note_departure(event.worker_id, event)
        elif (known := self.requests.get(event.arguments.get("request", ""))) is not None:
            self._note_step(known, known.advanced(event))
        elif (opened := ScaleRequest.opened(event)) is not None:
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

    def _note_step(self, before: ScaleRequest, after: ScaleRequest) -> None:
        if after is before:
            return
        self.requests[after.request_id] = after
        if after.kind is Kind.OUT:
            is_kept = after.status not in (Status.REMOVING, Status.FAILED, Status.CANCELLED)
            coming = set(after.coming) if is_kept else set()
            for worker_id in after.workers:
                self._place(worker_id, Standing.WANTED if worker_id in coming else Standing.LEAVING)
        else:
            drain = 0 if after.force else after.timeout
            for worker_id in after.workers:
                self._place(worker_id, Standing.LEAVING, drain_micros=drain)
        if not after.is_open:
            self._end(after)

    def _place(
        self, worker_id: str, standing: Standing, *, drain_micros: int | None = None
    ) -> None:
        if (
            worker := self.workers.get(worker_id)
        ) is not None and worker.standing is not Standing.LEAVING:
            self.workers[worker_id] = replace(worker, standing=standing, drain_micros=drain_micros)

    def _note_departure(self, worker_id: str, event: RunCommanded) -> None:
        if self.workers.pop(worker_id, None) is None:
            return
        self.heard.pop(worker_id, None)  # an id is never used twice
        for request in list(self.requests.values()):
            if not request.is_open or worker_id not in request.workers:
                continue
            has_failed = (
                request.kind is Kind.OUT
                and worker_id in request.coming
                and event.arguments.get("left") == Departure.FAILED
            )
            failed = (*request.failed, (worker_id, event.reason)) if has_failed else request.failed
            self.requests[request.request_id] = replace(
                request, failed=failed, left=request.left | {worker_id}
            )

    def _end(self, request: ScaleRequest) -> None:
        """Keep a request that is over, and forget those that have been over for long."""
        self.requests[request.request_id] = request
        self.ended[request.role, request.kind, request.status] += 1
        over = [other for other in self.requests.values() if not other.is_open]
        for old in over[:-NUM_KEPT]:
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

    def staying(self, role: str) -> list[ElasticWorker]:
        """Return a role's elastic workers that are not leaving, oldest first."""
        return [
            worker
            for worker in self.workers.values()
            if worker.role == role and worker.standing is not Standing.LEAVING
        ]

    def next_index(self, role: str, *, num_at_start: int) -> int:
        """Return the first index that no worker of the role ever had."""
        return max(self._last_index.get(role, 0), num_at_start - 1) + 1

    def beat(self, worker_id: str, *, since: int) -> WorkerBeat | None:
        """Return a worker's newest beat after a time; an older one is another's, of a run of the
        same name.
        """
        beat = self.heard.get(worker_id)
        return beat if beat is not None and beat.beat_at > since else None

    def is_serving(self, request: ScaleRequest, worker_id: str) -> bool:
        """Tell whether a worker that was asked for takes work, with weights that are new enough."""
        beat = self.beat(worker_id, since=request.created_at)
        return (
            is_up(beat)
            and beat is not None
            and (beat.role != "rollout" or beat.policy_version >= request.policy_version)
        )


def is_up(beat: WorkerBeat | None) -> bool:
    """Tell whether a worker is past its start and not at its end."""
    return beat is not None and beat.state in (WorkerState.IDLE, WorkerState.WORKING)
