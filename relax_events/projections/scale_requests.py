"""Scale requests, and the commands that put them on the control log."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

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


STAGES = {
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
"""A request only moves forward; the statuses of the last stage are final."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleRequest:
    """Workers of a role that are to be added or removed.

    Attributes:
        request_id: Its id.
        model: Name of the role in the API.
        target: Wanted number of workers of the role, the initial ones included.
        workers: Ids of the added or removed workers.
        urls: Of the servers that the added workers attach to, one each; empty for workers with
            engines of their own.
        timeout: Microseconds until added workers must serve, or until removed ones are killed.
        force: Removed workers are killed at once.
        policy_version: Added workers serve once they have this version; -1 where there is none yet.
        key: Idempotency key, by which a repeated call is recognised.
        digest: Digest of the command under the key.
        failed: Workers that did not start, with the reason.
        exited_workers: Workers that have exited.
        outcome: The final status once the request's workers are removed again.
        error: Why the request did not reach its target.
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
    exited_workers: frozenset[str] = frozenset()
    outcome: Status | None = None
    error: str = ""
    created_at: int
    updated_at: int

    @property
    def stage(self) -> int:
        """How far it has advanced."""
        return find_stage(self.kind, self.status)

    @property
    def is_open(self) -> bool:
        """Whether it still has a next step."""
        return self.stage < len(STAGES[self.kind]) - 1

    @property
    def expected_workers(self) -> tuple[str, ...]:
        """The workers that have not failed."""
        failed = {worker_id for worker_id, _ in self.failed}
        return tuple(worker_id for worker_id in self.workers if worker_id not in failed)

    def open_command(self, *, reason: str) -> RunCommanded:
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

    def status_command(
        self,
        status: Status,
        *,
        now: int,
        reason: str = "",
        outcome: Status | None = None,
        failed: Iterable[str] = (),
        error: str = "",
    ) -> RunCommanded:
        """Return the command that advances the request to a status; see the attributes. `failed`
        are further workers, for the reason `error`.
        """
        arguments = {
            "request": self.request_id,
            "status": status.value,
            "failed": " ".join(failed),
            "error": error,
        }
        if outcome is not None:
            arguments["outcome"] = outcome.value
        text = reason or error or f"request {self.request_id} is {status.value}"
        return RunCommanded(
            command=Command.SCALE,
            role=self.role,
            reason=text,
            arguments=arguments,
            commanded_at=now,
        )

    @classmethod
    def from_command(cls, event: RunCommanded) -> ScaleRequest | None:
        """Parse a request from the command that opened it; return None for any other command."""
        arguments = event.arguments
        try:
            request = cls(
                request_id=arguments["request"],
                kind=Kind(arguments["kind"]),
                model=arguments["model"],
                role=event.role or "",
                target=int(arguments["target"]),
                workers=tuple(arguments["workers"].split()),
                urls=tuple(arguments["urls"].split()),
                timeout=int(arguments["timeout"]),
                force=arguments["force"] == str(True),
                policy_version=int(arguments["policy_version"]),
                key=arguments["key"],
                digest=arguments["digest"],
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

    def with_status(self, event: RunCommanded) -> ScaleRequest:
        """Return the request after a status command. A command that is read a second time changes
        nothing.
        """
        arguments = event.arguments
        try:
            status = Status(arguments["status"])
            outcome = Status(arguments["outcome"]) if "outcome" in arguments else self.outcome
            is_forward = find_stage(self.kind, status) > self.stage
        except (KeyError, ValueError):
            return self
        if not is_forward:
            return self
        error = arguments.get("error", "")
        failed = (
            *self.failed,
            *((worker_id, error) for worker_id in arguments.get("failed", "").split()),
        )
        return replace(
            self,
            status=status,
            outcome=outcome,
            failed=failed,
            error=error or self.error,
            updated_at=event.commanded_at,
        )


def find_stage(kind: Kind, status: Status) -> int:
    """Return how far a request of a kind is in a status.

    Raises:
        ValueError: Requests of this kind are never in it.
    """
    for stage, statuses in enumerate(STAGES[kind]):
        if status in statuses:
            return stage
    raise ValueError(f"{kind} has no status {status}")
