"""Opens what every role needs: the object store with its claim check, and the worker itself."""

from __future__ import annotations

from collections.abc import Sequence

from relax_events.config import RunConfig
from relax_events.events.types import Event
from relax_events.objects.claim_check import check_in, check_out
from relax_events.objects.store import ObjectStore
from relax_events.pipeline.worker import Worker


class StoreClaimCheck:
    """The claim check over an object store."""

    def __init__(self, store: ObjectStore, *, inline_max_bytes: int) -> None:
        self._store, self._inline_max_bytes = store, inline_max_bytes

    def check_in(self, event: Event) -> Event:
        """Store arrays above the limit."""
        return check_in(event, self._store, inline_max_bytes=self._inline_max_bytes)

    def check_out(self, event: Event) -> Event:
        """Fetch stored arrays."""
        return check_out(event, self._store)


def open_store(config: RunConfig) -> ObjectStore:
    """Open the run's object store."""
    return ObjectStore.open(config.objects_uri)


def open_worker(
    role: str, config: RunConfig, *, index: int, store: ObjectStore | None = None, follow: Sequence[str] = (), linger_ms: float | None = None
) -> Worker:
    """Make the worker of a role, draining on signals. Use it as a context manager."""
    claim_check = StoreClaimCheck(store or open_store(config), inline_max_bytes=config.objects.inline_max_bytes)
    worker = Worker(role, config, claim_check=claim_check, index=index, follow=follow, linger_ms=linger_ms)
    worker.drain.listen_to_signals()
    return worker
