"""Decides whether a scale command is accepted, and builds its request: pure functions over
`ScaleState`.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from relax_events.controller.scaling_bounds import DEFAULT_MODEL, ScalingBounds, WorkerPool
from relax_events.projections.scale_requests import MICROS, Kind, ScaleRequest, Status
from relax_events.projections.scaling import ElasticWorker, ScaleState

TOLERANCE = 0.1


class RejectedError(Exception):  # a response to the caller, no error of the run
    """A scale command that can't be carried out; the text names the reason and the remedy."""

    code = 400
    word = "REJECTED"


class NotFoundError(RejectedError):
    """The command names a model or a request that does not exist."""

    code = 404
    word = "NOT_FOUND"


class ConflictError(RejectedError):
    """Another request must finish first."""

    code = 409
    word = "CONFLICT"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleCommand:
    """A caller's wish.

    Attributes:
        kind: Add or remove workers.
        model: The model whose workers are meant.
        target: Wanted number of workers, the initial ones included; 0 when `urls` are given.
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

    @property
    def digest(self) -> str:
        """Digest of every field but the key."""
        digest_fields = (
            self.kind.value,
            self.model,
            self.target,
            self.urls,
            self.timeout_seconds,
            self.force,
        )
        return hashlib.blake2b(repr(digest_fields).encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class Admission:
    """The result of a command: a new request, the request of an identical earlier call, or nothing
    to do.
    """

    request: ScaleRequest | None
    is_new: bool
    text: str


def admit(
    state: ScaleState, bounds: ScalingBounds, command: ScaleCommand, *, now: int
) -> Admission:
    """Decide on a command, and change nothing.

    Args:
        state: The folded log.
        bounds: Of the run.
        command: Of the caller.
        now: Microseconds since the epoch.
    Raises:
        RejectedError, NotFoundError, ConflictError: The command is not accepted.
    """
    if (earlier_request := _find_repeated_call(state, command)) is not None:
        return Admission(
            earlier_request,
            False,
            f"request {earlier_request.request_id} was made by an identical call",
        )
    pool = _find_pool(bounds, command)
    _require_within_bounds(bounds, pool, command)
    workers_or_reason = (
        _workers_to_add(state, bounds, pool, command)
        if command.kind is Kind.OUT
        else _workers_to_remove(state, pool, command)
    )
    if isinstance(workers_or_reason, str):
        return Admission(None, False, workers_or_reason)
    _require_beyond_tolerance(state, bounds, pool, command, num_changed=len(workers_or_reason))
    if (other := state.open_request(pool.model)) is not None:
        raise ConflictError(
            f"request {other.request_id} for {pool.model} is {other.status.value}; wait for "
            "its end, or cancel it"
        )
    return Admission(
        _build_request(state, bounds, pool, command, workers_or_reason, now=now),
        True,
        _describe(command, pool, workers_or_reason),
    )


def _require_within_bounds(bounds: ScalingBounds, pool: WorkerPool, command: ScaleCommand) -> None:
    """Refuse a command that is contradictory, exceeds the bounds, or can't be carried out here."""
    if bool(command.target) == bool(command.urls):
        choice = "both" if command.target else "neither"
        raise RejectedError(
            f"num_replicas and engine_urls exclude each other, and {choice} is given; "
            "give num_replicas >= 1 or engine_urls"
        )
    if command.target > pool.max_workers:
        raise RejectedError(
            f"{command.target} workers of {pool.model} are more than {pool.max_workers}: "
            f"{pool.limit}"
        )
    if (
        command.kind is Kind.OUT
        and command.timeout_seconds is not None
        and command.timeout_seconds * MICROS < pool.least_timeout
    ):
        raise RejectedError(
            f"timeout_secs must be >= {pool.least_timeout / MICROS:g}, got "
            f"{command.timeout_seconds:g}: a server of {pool.model} may take "
            f"{pool.least_timeout / MICROS:g} s to start and load (engine.sglang.start_seconds); "
            "leave it out"
        )
    if bounds.has_external_autoscaler and (command.urls or command.force):
        raise RejectedError(
            "engine_urls: the pods of a StatefulSet are alike, so none attaches to a server of its "
            "own; set engine.sglang.urls in the run file"
            if command.urls
            else "force: Kubernetes gives every pod its terminationGracePeriodSeconds to drain; "
            "leave force out"
        )
    if not bounds.is_supervised and not bounds.has_external_autoscaler:
        raise RejectedError(
            "the workers of this run were not started by `relax run`, so this controller can't "
            f"start or end one; scale the service {pool.role} where it was started, or by KEDA; "
            "see docs/how-to/scaling.md"
        )


def _require_beyond_tolerance(
    state: ScaleState,
    bounds: ScalingBounds,
    pool: WorkerPool,
    command: ScaleCommand,
    *,
    num_changed: int,
) -> None:
    """Refuse a change that Kubernetes' HorizontalPodAutoscaler, and so KEDA, would ignore.

    Source: kubernetes.io, "Horizontal Pod Autoscaling", tolerance 0.1.
    """
    num_workers = pool.num_at_start + len(state.remaining_workers(pool.role))
    larger = num_workers + (num_changed if command.kind is Kind.OUT else 0)
    if bounds.has_external_autoscaler and num_changed <= TOLERANCE * larger:
        raise RejectedError(
            f"{num_workers} workers of {pool.model} would change by {num_changed}: Kubernetes "
            "ignores a change of at most a tenth; change more workers at once"
        )


def _find_repeated_call(state: ScaleState, command: ScaleCommand) -> ScaleRequest | None:
    earlier_request = next(
        (
            request
            for request in state.requests.values()
            if command.key and request.key == command.key
        ),
        None,
    )
    if earlier_request is not None and earlier_request.digest != command.digest:
        raise ConflictError(
            f"the key {command.key} belongs to request {earlier_request.request_id}, "
            "with other arguments; take another key"
        )
    return earlier_request


def _find_pool(bounds: ScalingBounds, command: ScaleCommand) -> WorkerPool:
    if command.model not in bounds.pools:
        there = ", ".join(bounds.pools) or "none: it replays another run"
        raise NotFoundError(f"this run has no model {command.model!a}; there is {there}")
    return bounds.pools[command.model]


def _workers_to_add(
    state: ScaleState, bounds: ScalingBounds, pool: WorkerPool, command: ScaleCommand
) -> list[ElasticWorker] | str:
    """Return the workers to add, or why none is needed."""
    there = state.remaining_workers(pool.role)
    num_there = pool.num_at_start + len(there)
    first = state.next_index(pool.role, num_at_start=pool.num_at_start)
    if bounds.has_external_autoscaler:
        first = num_there  # a StatefulSet's next pod
        if (leaving := state.workers.get(f"{pool.role}-{first}")) is not None:
            raise ConflictError(f"{leaving.worker_id} still leaves; repeat the call once it has")
    if not command.urls:
        if command.target <= num_there:
            return f"workers of {pool.model} there are: {num_there}"
        if pool.urls:
            remedy = (
                "name other servers in engine_urls"
                if pool.model == DEFAULT_MODEL
                else "leave the urls out of the run file"
            )
            raise RejectedError(
                f"workers of {pool.model} attach to servers, and the servers of the run file have "
                f"theirs; {remedy}"
            )
        return [
            ElasticWorker(f"{pool.role}-{first + index}", pool.role, "")
            for index in range(command.target - num_there)
        ]
    if pool.model != DEFAULT_MODEL:
        raise RejectedError(
            f"engine_urls are of servers for model {DEFAULT_MODEL!r}, got model "
            f"{pool.model!r}; give num_replicas"
        )
    attached = {worker.url for worker in there} | {url.rstrip("/") for url in pool.urls}
    new = [url for url in dict.fromkeys(map(_checked_url, command.urls)) if url not in attached]
    if num_there + len(new) > pool.max_workers:
        raise RejectedError(
            f"{num_there + len(new)} workers of {pool.model} are more than "
            f"{pool.max_workers}: {pool.limit}"
        )
    if not new:
        return "all these servers are attached already"
    return [
        ElasticWorker(f"{pool.role}-{first + index}", pool.role, url)
        for index, url in enumerate(new)
    ]


def _checked_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        is_whole = (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and (parts.port is None or parts.port > 0)
        )
    except ValueError:
        is_whole = False
    if (
        not is_whole
        or not url.isascii()
        or not url.isprintable()
        or any(sign in url for sign in " \"'\\")
    ):
        raise RejectedError(
            f"engine_urls: {url[:200]!a} is no address of a server; give http://host:port"
        )
    return url.rstrip("/")


def _workers_to_remove(
    state: ScaleState, pool: WorkerPool, command: ScaleCommand
) -> list[ElasticWorker] | str:
    """Return the workers to remove, newest first, or why none must go."""
    there = state.remaining_workers(pool.role)
    if command.urls:
        urls = {url.rstrip("/") for url in command.urls}
        if unknown := sorted(urls - {worker.url for worker in there}):
            raise RejectedError(
                f"engine_urls: no worker that was added is attached to {unknown[0][:200]!a}; "
                "workers of the start stay"
            )
        return [worker for worker in reversed(there) if worker.url in urls]
    if command.target < pool.num_at_start:
        raise RejectedError(
            f"the run starts with {pool.num_at_start} workers of {pool.model}, and they stay; "
            f"num_replicas must be >= {pool.num_at_start}, got {command.target}"
        )
    surplus = pool.num_at_start + len(there) - command.target
    if surplus <= 0:
        return f"workers of {pool.model} there are: {pool.num_at_start + len(there)}"
    return list(reversed(there))[:surplus]


def _build_request(
    state: ScaleState,
    bounds: ScalingBounds,
    pool: WorkerPool,
    command: ScaleCommand,
    workers: Sequence[ElasticWorker],
    *,
    now: int,
) -> ScaleRequest:
    usual = pool.timeout if command.kind is Kind.OUT else bounds.drain
    sign = 1 if command.kind is Kind.OUT else -1
    return ScaleRequest(
        request_id=f"scale-{command.kind.value}-{uuid.uuid4().hex[:12]}",
        kind=command.kind,
        model=pool.model,
        role=pool.role,
        target=command.target
        or pool.num_at_start + len(state.remaining_workers(pool.role)) + sign * len(workers),
        workers=tuple(worker.worker_id for worker in workers),
        urls=tuple(worker.url for worker in workers) if command.urls else (),
        timeout=usual if command.timeout_seconds is None else int(command.timeout_seconds * MICROS),
        force=command.force,
        policy_version=state.policy_version if state.policy_version > bounds.first_version else -1,
        key=command.key,
        digest=command.digest,
        created_at=now,
        updated_at=now,
    )


def _describe(command: ScaleCommand, pool: WorkerPool, workers: Sequence[ElasticWorker]) -> str:
    names = ", ".join(worker.worker_id for worker in workers)
    come, go = ("comes", "goes") if len(workers) == 1 else ("come", "go")
    return f"{names} {come if command.kind is Kind.OUT else go}, of model {pool.model}"


def require_cancellable(request: ScaleRequest) -> ScaleRequest:
    """Return a request that may be cancelled.

    Raises:
        RejectedError: The request is over, or removes workers: a drain that has begun is not
            undone.
    """
    if request.kind is Kind.IN:
        raise RejectedError(
            f"request {request.request_id} removes workers, which can't be cancelled; add "
            "them again"
        )
    if not request.is_open or request.status is Status.REMOVING:
        raise RejectedError(
            f"request {request.request_id} is {request.status.value}; only what has not "
            "ended can be cancelled"
        )
    return request
