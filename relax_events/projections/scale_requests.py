"""Scale requests, and their records on the control log.

The record of a request is the request itself. It is written at most twice. The first changes the
desired number of a role's workers: its workers are added, or leave. The second ends a request that
adds workers, and names those that leave again. A status is not recorded: `ScaleState.status`
computes it from these, from the exits of the workers and from their heartbeats.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from pydantic import TypeAdapter, ValidationError

from relax_events.events.parts import Command
from relax_events.events.types import RunCommanded

MICROS = 1_000_000


class Kind(StrEnum):
    """Whether workers are added or removed."""

    OUT = "out"
    IN = "in"


class Status(StrEnum):
    """The status of a request, as in Relax."""

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


ENDS = {
    Kind.OUT: {Status.ACTIVE, Status.CANCELLED, Status.FAILED, Status.PARTIAL},
    Kind.IN: {Status.COMPLETED, Status.FAILED},
}
"""The statuses of ended requests."""


DEFAULT_MODEL = "default"
"""The policy's engines: the rollout workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleCommand:
    """A caller's wish.

    Attributes:
        kind: Add or remove workers.
        model: The model whose workers are meant.
        target: Desired number of workers, the initial ones included; 0 when `urls` are given.
        urls: Servers to attach to, or to detach.
        timeout_seconds: Time limit of the request; None for the run file's.
        force: Remove workers without draining them.
        key: Idempotency key, by which a repeated call is recognised; empty for none.
    """

    kind: Kind
    model: str = DEFAULT_MODEL
    target: int = 0
    urls: tuple[str, ...] = ()
    timeout_seconds: float | None = None
    force: bool = False
    key: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleRequest:
    """Workers of a role that are added or removed.

    Attributes:
        request_id: Its id.
        command: The caller's wish.
        role: The role of the model.
        target: Desired number of workers of the role, the initial ones included.
        workers: Ids of the added or removed workers.
        urls: Of the servers that the added workers attach to, one each; empty for workers with
            engines of their own.
        timeout: Microseconds until added workers must serve, or until removed ones are killed.
        policy_version: Added workers serve once they have this version; -1 where there is none yet.
        exit_deadline: When the exits of leaving workers are overdue, in microseconds since the
            epoch.
        outcome: How a request that adds workers ended; None before, and where it removes workers.
        returned: Added workers that leave again, by that outcome.
        error: Why the request did not reach its target.
        updated_at: When it was written, in microseconds since the epoch.
        exits: When each worker exited, with the reason where it failed; not part of the record.
    """

    request_id: str
    command: ScaleCommand
    role: str
    target: int
    workers: tuple[str, ...]
    urls: tuple[str, ...] = ()
    timeout: int
    policy_version: int = -1
    exit_deadline: int = 0
    outcome: Status | None = None
    returned: tuple[str, ...] = ()
    error: str = ""
    created_at: int
    updated_at: int
    exits: Mapping[str, tuple[int, str]] = field(default_factory=dict)

    @property
    def kind(self) -> Kind:
        """Whether workers are added or removed."""
        return self.command.kind

    @property
    def failed(self) -> dict[str, str]:
        """The added workers that did not come to serve, with the reason where one is known."""
        exits = {worker_id: reason for worker_id, (_, reason) in self.exits.items() if reason}
        late = self.returned if self.outcome is Status.PARTIAL else ()
        return dict.fromkeys(late, "") | exits

    @property
    def expected_workers(self) -> list[str]:
        """The workers that have not failed."""
        return [worker_id for worker_id in self.workers if worker_id not in self.failed]

    @property
    def leaving_workers(self) -> tuple[str, ...]:
        """The workers whose exits end the request."""
        return self.workers if self.kind is Kind.IN else self.returned

    @property
    def is_undecided(self) -> bool:
        """Whether its added workers may still come to serve."""
        return self.kind is Kind.OUT and self.outcome is None

    def overdue_workers(self, *, now: int) -> list[str]:
        """Return the leaving workers whose exit was not reported by the deadline."""
        return [
            worker_id
            for worker_id in self.leaving_workers
            if self.exits.get(worker_id, (now, ""))[0] > self.exit_deadline
        ]

    def is_open(self, *, now: int) -> bool:
        """Return whether it has not ended: an unreported exit keeps it open until the deadline."""
        return self.is_undecided or (
            now <= self.exit_deadline and not self.exits.keys() >= {*self.leaving_workers}
        )

    def describe_error(self, *, now: int) -> str:
        """Return why it did not reach its target, as known by a time."""
        overdue = ", ".join(self.overdue_workers(now=now))
        unreported = f"no exit was reported in time of {overdue}" if overdue else ""
        return "; ".join(filter(None, (self.error, unreported)))

    def end(
        self,
        outcome: Status,
        *,
        now: int,
        exit_deadline: int = 0,
        returned: Iterable[str] = (),
        error: str = "",
    ) -> ScaleRequest:
        """Return the request as it ends; see the attributes."""
        return replace(
            self,
            outcome=outcome,
            exit_deadline=exit_deadline,
            returned=tuple(returned),
            error=error,
            updated_at=now,
        )

    def after(self, record: ScaleRequest) -> ScaleRequest:
        """Return the request after a record of it: only the one that ends it counts, and once."""
        if not self.is_undecided or record.outcome not in ENDS[Kind.OUT]:
            return self
        return replace(record, exits=self.exits)

    def to_record(self, *, reason: str = "") -> RunCommanded:
        """Return the record of the request for the log."""
        return RunCommanded(
            command=Command.SCALE,
            role=self.role,
            reason=reason or self.error or f"request {self.request_id} is {self.outcome}",
            arguments={"request": ADAPTER.dump_json(self, exclude={"exits"}).decode()},
            commanded_at=self.updated_at,
        )

    @classmethod
    def from_record(cls, event: RunCommanded) -> ScaleRequest | None:
        """Parse a request; return None for any other command."""
        try:
            request = ADAPTER.validate_json(event.arguments["request"])
        except (KeyError, ValidationError):
            return None
        are_named = all(
            re.fullmatch(rf"{re.escape(request.role)}-[0-9]+", worker_id)
            for worker_id in request.workers
        )
        are_attached = len(request.urls) in (0, len(request.workers))
        return request if request.workers and are_named and are_attached else None


ADAPTER = TypeAdapter(ScaleRequest)
