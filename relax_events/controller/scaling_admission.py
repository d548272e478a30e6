"""Whether a request is taken up, and what it is then: pure functions over `ScaleState`."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from relax_events.controller.scaling_bounds import DEFAULT_MODEL, ScalingBounds, WorkerPool
from relax_events.projections.scale_requests import MICROS, Kind, ScaleRequest, Status
from relax_events.projections.scaling import ElasticWorker, ScaleState


class RejectedError(Exception):  # what a caller is answered, no error of the run
    """A call that comes to nothing: the text says why and what would do."""

    code = 400
    word = "REJECTED"


class NotFoundError(RejectedError):
    """It names what is not there."""

    code = 404
    word = "NOT_FOUND"


class ConflictError(RejectedError):
    """Something else has to be over first."""

    code = 409
    word = "CONFLICT"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleCommand:
    """What a caller wants.

    Attributes:
        kind: Workers shall come or go.
        model: Whose.
        target: How many there shall be, those of the start among them; 0 when `urls` say it.
        urls: Servers to attach to, or to let go.
        timeout_seconds: For all of it; None for what the run file says.
        force: Let workers go without waiting for what they hold.
        key: By which a call that is repeated is known again; empty for none.
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
        """Of all but the key."""
        said = (
            self.kind.value,
            self.model,
            self.target,
            self.urls,
            self.timeout_seconds,
            self.force,
        )
        return hashlib.blake2b(repr(said).encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class Admission:
    """What a call comes to: a new request to be opened, one that was opened by the same call
    before, or nothing to do.
    """

    request: ScaleRequest | None
    is_new: bool
    text: str


def admit(state: ScaleState, bounds: ScalingBounds, asked: ScaleCommand, *, now: int) -> Admission:
    """Find out what a call comes to, and change nothing.

    Args:
        state: What the log says.
        bounds: Of the run.
        asked: By the caller.
        now: Microseconds since the epoch.
    Raises:
        Refused, Unknown, Conflicting: It comes to nothing.
    """
    if (known := _find_repeated_call(state, asked)) is not None:
        return Admission(known, False, f"request {known.request_id} was made by the same call")
    pool = _find_pool(bounds, asked)
    if bool(asked.target) == bool(asked.urls):
        given = "both" if asked.target else "neither"
        raise RejectedError(
            f"num_replicas and engine_urls say the same in two ways, and {given} is given; "
            "give num_replicas >= 1 or engine_urls"
        )
    if asked.target > pool.max_workers:
        raise RejectedError(
            f"{asked.target} workers of {pool.model} are more than {pool.max_workers}: {pool.limit}"
        )
    if (
        asked.kind is Kind.OUT
        and asked.timeout_seconds is not None
        and asked.timeout_seconds * MICROS < pool.least_timeout
    ):
        least = (
            f"a server of {pool.model} may take {pool.least_timeout / MICROS:g} s to start and "
            "load (engine.sglang.start_seconds)"
        )
        raise RejectedError(
            f"timeout_secs must be >= {pool.least_timeout / MICROS:g}, got "
            f"{asked.timeout_seconds:g}: {least}; leave it out"
        )
    if not bounds.is_supervised:
        remedy = (
            f"scale the service {pool.role} where it was started, or by KEDA; see "
            "docs/how-to/scale-rollout.md"
        )
        raise RejectedError(
            "the workers of this run were not started by `relax run`, so nobody here can "
            f"start or end one; {remedy}"
        )
    found = _workers_to_add(state, pool, asked) if asked.kind is Kind.OUT else _workers_to_remove(state, pool, asked)
    if isinstance(found, str):
        return Admission(None, False, found)
    if (other := state.open_request(pool.model)) is not None:
        raise ConflictError(
            f"request {other.request_id} for {pool.model} is {other.status.value}; wait for "
            "its end, or cancel it"
        )
    return Admission(
        _build_request(state, bounds, pool, asked, found, now=now), True, _describe(asked, pool, found)
    )


def _find_repeated_call(state: ScaleState, asked: ScaleCommand) -> ScaleRequest | None:
    known = next(
        (request for request in state.requests.values() if asked.key and request.key == asked.key),
        None,
    )
    if known is not None and known.digest != asked.digest:
        raise ConflictError(
            f"the key {asked.key} belongs to request {known.request_id}, which asked for "
            "something else; take another key"
        )
    return known


def _find_pool(bounds: ScalingBounds, asked: ScaleCommand) -> WorkerPool:
    if asked.model not in bounds.pools:
        there = ", ".join(bounds.pools) or "none: it replays another run"
        raise NotFoundError(f"this run has no model {asked.model!a}; there is {there}")
    return bounds.pools[asked.model]


def _workers_to_add(state: ScaleState, pool: WorkerPool, asked: ScaleCommand) -> list[ElasticWorker] | str:
    """Return who shall come, or why nobody needs to."""
    there = state.remaining_workers(pool.role)
    num_there = pool.num_at_start + len(there)
    first = state.next_index(pool.role, num_at_start=pool.num_at_start)
    if not asked.urls:
        if asked.target <= num_there:
            return f"workers of {pool.model} there are: {num_there}"
        if pool.urls:
            remedy = (
                "name servers of their own in engine_urls"
                if pool.model == DEFAULT_MODEL
                else "leave the urls out of the run file"
            )
            raise RejectedError(
                f"workers of {pool.model} attach to servers, and those of the run file have "
                f"theirs; {remedy}"
            )
        return [
            ElasticWorker(f"{pool.role}-{first + place}", pool.role, "")
            for place in range(asked.target - num_there)
        ]
    if pool.model != DEFAULT_MODEL:
        raise RejectedError(
            f"engine_urls are of servers for model {DEFAULT_MODEL!r}, got model "
            f"{pool.model!r}; give num_replicas"
        )
    attached = {worker.url for worker in there} | {url.rstrip("/") for url in pool.urls}
    new = [url for url in dict.fromkeys(map(_checked_url, asked.urls)) if url not in attached]
    if num_there + len(new) > pool.max_workers:
        raise RejectedError(
            f"{num_there + len(new)} workers of {pool.model} are more than "
            f"{pool.max_workers}: {pool.limit}"
        )
    if not new:
        return "all these servers are attached already"
    return [
        ElasticWorker(f"{pool.role}-{first + place}", pool.role, url)
        for place, url in enumerate(new)
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


def _workers_to_remove(state: ScaleState, pool: WorkerPool, asked: ScaleCommand) -> list[ElasticWorker] | str:
    """Return who shall go, the newest first, or why nobody needs to."""
    there = state.remaining_workers(pool.role)
    if asked.urls:
        urls = {url.rstrip("/") for url in asked.urls}
        if unknown := sorted(urls - {worker.url for worker in there}):
            raise RejectedError(
                f"engine_urls: no worker that was added is attached to {unknown[0][:200]!a}; "
                "those of the start stay"
            )
        return [worker for worker in reversed(there) if worker.url in urls]
    if asked.target < pool.num_at_start:
        what = f"the run starts with {pool.num_at_start} workers of {pool.model}, and those stay"
        raise RejectedError(f"{what}; num_replicas must be >= {pool.num_at_start}, got {asked.target}")
    surplus = pool.num_at_start + len(there) - asked.target
    if surplus <= 0:
        return f"workers of {pool.model} there are: {pool.num_at_start + len(there)}"
    return list(reversed(there))[:surplus]


def _build_request(
    state: ScaleState,
    bounds: ScalingBounds,
    pool: WorkerPool,
    asked: ScaleCommand,
    found: Sequence[ElasticWorker],
    *,
    now: int,
) -> ScaleRequest:
    usual = pool.timeout if asked.kind is Kind.OUT else bounds.drain
    sign = 1 if asked.kind is Kind.OUT else -1
    return ScaleRequest(
        request_id=f"scale-{asked.kind.value}-{uuid.uuid4().hex[:12]}",
        kind=asked.kind,
        model=pool.model,
        role=pool.role,
        target=asked.target
        or pool.num_at_start + len(state.remaining_workers(pool.role)) + sign * len(found),
        workers=tuple(worker.worker_id for worker in found),
        urls=tuple(worker.url for worker in found) if asked.urls else (),
        timeout=usual if asked.timeout_seconds is None else int(asked.timeout_seconds * MICROS),
        force=asked.force,
        policy_version=state.policy_version if state.policy_version > bounds.first_version else -1,
        key=asked.key,
        digest=asked.digest,
        created_at=now,
        updated_at=now,
    )


def _describe(asked: ScaleCommand, pool: WorkerPool, found: Sequence[ElasticWorker]) -> str:
    names = ", ".join(worker.worker_id for worker in found)
    come, go = ("comes", "goes") if len(found) == 1 else ("come", "go")
    return f"{names} {come if asked.kind is Kind.OUT else go}, of model {pool.model}"


def require_cancellable(request: ScaleRequest) -> ScaleRequest:
    """Return a request that may be cancelled.

    Raises:
        Refused: It is over, or takes workers away: a drain that has begun is not taken back.
    """
    if request.kind is Kind.IN:
        raise RejectedError(
            f"request {request.request_id} lets workers go, which is not taken back; ask for "
            "as many again"
        )
    if not request.is_open or request.status is Status.REMOVING:
        raise RejectedError(
            f"request {request.request_id} is {request.status.value}; only what has not "
            "ended can be cancelled"
        )
    return request
