"""Opens what every role needs: the object store with its claim check, and the worker itself."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from relax_events.broker.eviction import evict_predecessors
from relax_events.config import RunConfig
from relax_events.events.types import Event
from relax_events.objects.backends import errors as object_errors
from relax_events.objects.claim_check import check_in, check_out
from relax_events.objects.roots import AllowedRoots
from relax_events.objects.store import ObjectStore
from relax_events.pipeline.worker import Worker
from relax_events.telemetry.metrics import ErrorMetrics
from relax_events.topics.rights import ROLE_RIGHTS

ROUTING_ROLES = ("actor-forward", "trainer")
"""Roles that read which experts tokens went through; to the others a large array of these is a reference that they pass on."""


class StoreClaimCheck:
    """The claim check over an object store; references that lead out of it are refused."""

    def __init__(self, store: ObjectStore, *, inline_max_bytes: int, allowed_roots: Sequence[str] = (), leave: Collection[str] = ()) -> None:
        self._store, self._inline_max_bytes, self._leave = store, inline_max_bytes, leave
        self._roots = AllowedRoots.of(store.uri(""), allowed_roots)

    def check_in(self, event: Event) -> Event:
        """Store arrays above the limit."""
        return check_in(event, self._store, inline_max_bytes=self._inline_max_bytes)

    def check_out(self, event: Event) -> Event:
        """Fetch stored arrays that the role computes with, once all media are found to lie where they may."""
        self._roots.check(event)
        return check_out(event, self._store, leave=self._leave)


def open_store(config: RunConfig) -> ObjectStore:
    """Open the run's object store."""
    return ObjectStore.open(config.objects_uri, moved_from=config.objects.moved_from)


def open_worker(
    role: str, config: RunConfig, *, index: int, store: ObjectStore | None = None, follow: Sequence[str] = (), linger_ms: float | None = None
) -> Worker:
    """Make the worker of a role, draining on signals; what an earlier process of its name still holds is free. Use it as a context manager."""
    opened, objects = store or open_store(config), config.objects
    leave = () if role in ROUTING_ROLES else ("routed_experts",)
    claim_check = StoreClaimCheck(opened, inline_max_bytes=objects.inline_max_bytes, allowed_roots=objects.allowed_roots, leave=leave)
    worker = Worker(role, config, claim_check=claim_check, index=index, follow=follow, linger_ms=linger_ms)
    worker.metrics.registry.register(ErrorMetrics(role, broker=worker.connection.errors, objects=object_errors))
    worker.drain.listen_to_signals()
    if ROLE_RIGHTS[role].is_member:
        evict_predecessors(worker.connection, worker.plan.consumer_group(role))
    return worker
