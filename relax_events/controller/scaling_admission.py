"""Decides whether a scale command is accepted, and builds its request: pure functions over
`ScaleState`.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from relax_events.controller.scaling_bounds import ScalingBounds, WorkerPool
from relax_events.events.types import RunCommanded
from relax_events.projections.scale_requests import (
    DEFAULT_MODEL,
    MICROS,
    Kind,
    ScaleCommand,
    ScaleRequest,
    Status,
)
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
    if (earlier := _find_repeated_call(state, command)) is not None:
        text = f"request {earlier.request_id} was made by an identical call"
        return Admission(earlier, False, text)
    pool = find_pool(bounds, command.model)
    _require_within_bounds(bounds, pool, command)
    workers = (
        _workers_to_add(state, bounds, pool, command)
        if command.kind is Kind.OUT
        else _workers_to_remove(state, pool, command)
    )
    if isinstance(workers, str):
        return Admission(None, False, workers)
    request = _build_request(state, bounds, pool, command, workers, now=now)
    if bounds.has_external_autoscaler:
        _require_beyond_tolerance(pool, before=pool.num_desired(state), after=request.target)
    if (other := state.open_request(pool.role, now=now)) is not None:
        raise ConflictError(
            f"request {other.request_id} for {pool.model} is "
            f"{state.status(other, now=now).value}; wait for its end, or cancel it"
        )
    forms = ("comes", "come") if command.kind is Kind.OUT else ("goes", "go")
    text = f"{', '.join(request.workers)} {forms[len(workers) > 1]}, of model {pool.model}"
    return Admission(request, True, text)


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


def _require_beyond_tolerance(pool: WorkerPool, *, before: int, after: int) -> None:
    """Refuse a change that Kubernetes' HorizontalPodAutoscaler, and so KEDA, would ignore.

    Source: kubernetes.io, "Horizontal Pod Autoscaling", tolerance 0.1.
    """
    num_changed = abs(after - before)
    if num_changed <= TOLERANCE * max(before, after):
        raise RejectedError(
            f"{before} workers of {pool.model} would change by {num_changed}: Kubernetes "
            "ignores a change of at most a tenth; change more workers at once"
        )


def _find_repeated_call(state: ScaleState, command: ScaleCommand) -> ScaleRequest | None:
    for request in state.requests.values():
        if not command.key or request.command.key != command.key:
            continue
        if request.command != command:
            raise ConflictError(
                f"the key {command.key} belongs to request {request.request_id}, "
                "with other arguments; take another key"
            )
        return request
    return None


def find_pool(bounds: ScalingBounds, model: str) -> WorkerPool:
    """Return the workers of a model.

    Raises:
        NotFoundError: The run has no such model.
    """
    if model not in bounds.pools:
        there = ", ".join(bounds.pools) or "none: it replays another run"
        raise NotFoundError(f"this run has no model {model[:80]!a}; there is {there}")
    return bounds.pools[model]


def _workers_to_add(
    state: ScaleState, bounds: ScalingBounds, pool: WorkerPool, command: ScaleCommand
) -> list[ElasticWorker] | str:
    """Return the workers to add, or why none is needed."""
    num_there = pool.num_desired(state)
    first = state.next_index(pool.role, num_at_start=pool.num_at_start)
    if bounds.has_external_autoscaler:
        first = num_there  # a StatefulSet's next pod
        if (leaving := state.workers.get(f"{pool.role}-{first}")) is not None:
            raise ConflictError(f"{leaving.worker_id} still leaves; repeat the call once it has")
    if command.urls:
        urls = _urls_to_attach(state, pool, command)
    elif pool.urls and command.target > num_there:
        remedy = (
            "name other servers in engine_urls"
            if pool.model == DEFAULT_MODEL
            else "leave the urls out of the run file"
        )
        raise RejectedError(
            f"workers of {pool.model} attach to servers, and the servers of the run file have "
            f"theirs; {remedy}"
        )
    else:
        urls = [""] * (command.target - num_there)
    if not urls and command.urls:
        return "all these servers are attached already"
    return [
        ElasticWorker(f"{pool.role}-{index}", pool.role, url)
        for index, url in enumerate(urls, start=first)
    ] or f"workers of {pool.model} there are: {num_there}"


def _urls_to_attach(state: ScaleState, pool: WorkerPool, command: ScaleCommand) -> list[str]:
    """Return the servers of a command that no worker is attached to."""
    if pool.model != DEFAULT_MODEL:
        raise RejectedError(
            f"engine_urls are of servers for model {DEFAULT_MODEL!r}, got model "
            f"{pool.model!r}; give num_replicas"
        )
    attached = {worker.url for worker in state.remaining_workers(pool.role)}
    attached |= {url.rstrip("/") for url in pool.urls}
    urls = [url for url in dict.fromkeys(map(_checked_url, command.urls)) if url not in attached]
    if (num_workers := pool.num_desired(state) + len(urls)) > pool.max_workers:
        raise RejectedError(
            f"{num_workers} workers of {pool.model} are more than {pool.max_workers}: {pool.limit}"
        )
    return urls


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
    surplus = max(pool.num_desired(state) - command.target, 0)
    newest_first = list(reversed(there))[:surplus]
    return newest_first or f"workers of {pool.model} there are: {pool.num_desired(state)}"


def _build_request(
    state: ScaleState,
    bounds: ScalingBounds,
    pool: WorkerPool,
    command: ScaleCommand,
    workers: Sequence[ElasticWorker],
    *,
    now: int,
) -> ScaleRequest:
    is_out = command.kind is Kind.OUT
    timeout = pool.timeout if is_out else bounds.drain
    if command.timeout_seconds is not None:
        timeout = int(command.timeout_seconds * MICROS)
    num_changed = len(workers) if is_out else -len(workers)
    return ScaleRequest(
        request_id=f"scale-{command.kind.value}-{uuid.uuid4().hex[:12]}",
        command=command,
        role=pool.role,
        target=pool.num_desired(state) + num_changed,
        workers=tuple(worker.worker_id for worker in workers),
        urls=tuple(worker.url for worker in workers) if command.urls else (),
        timeout=timeout,
        policy_version=state.policy_version if state.policy_version > bounds.first_version else -1,
        exit_deadline=0 if is_out else now + timeout + bounds.confirm,
        created_at=now,
        updated_at=now,
    )


def cancel(
    state: ScaleState, bounds: ScalingBounds, request: ScaleRequest, *, now: int
) -> RunCommanded:
    """Return the record that ends a request by the caller's wish: its workers leave again.

    Raises:
        RejectedError: The request is over, or removes workers: a drain that has begun is not
            undone.
    """
    if request.kind is Kind.IN:
        raise RejectedError(
            f"request {request.request_id} removes workers, which can't be cancelled; add "
            "them again"
        )
    if not request.is_undecided:
        raise RejectedError(
            f"request {request.request_id} is {state.status(request, now=now).value}; only what "
            "has not ended can be cancelled"
        )
    ended = request.end(
        Status.CANCELLED,
        now=now,
        exit_deadline=now + bounds.drain + bounds.confirm,
        returned=request.workers,
    )
    return ended.to_record()
