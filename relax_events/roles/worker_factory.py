"""Opens a role's worker and its object store."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence

from relax_events.config import ObjectsConfig, RunConfig
from relax_events.events.types import UNREAD_BY_REWARDS, RunDescribed
from relax_events.kafka.security.acls import ROLE_PERMISSIONS
from relax_events.kafka.workarounds.dead_members import evict_predecessors
from relax_events.objects.backends import errors as object_errors
from relax_events.objects.claim_check import ArraysAhead, check_in
from relax_events.objects.marker import claim_store, find_logged_marker
from relax_events.objects.outages import OUTAGE_DEADLINE_SECONDS, outages
from relax_events.objects.rights import ROLE_STORE_RIGHTS, SAMPLES
from relax_events.objects.store import AllowedRoots, ObjectStore
from relax_events.objects.version_objects import build_version_folder
from relax_events.runtime.control_follower import RECENT_VERSIONS, FetchWait
from relax_events.runtime.hosting import current_host
from relax_events.runtime.record_io import EventT
from relax_events.runtime.worker import Worker
from relax_events.session.resume import find_changes, refuse_changes
from relax_events.telemetry.metrics import ErrorMetrics

UNREAD_ARRAYS = {
    "actor-forward": (),
    "reward": UNREAD_BY_REWARDS,
    "trainer": (),
}
"""Arrays of samples that a role doesn't read, by role. If such an array is in the object store, the
role passes on the reference."""
UNREAD_BY_OTHERS = ("routed_experts",)


class StoreClaimCheck:
    """The claim check on an object store; rejects references outside it."""

    def __init__(
        self,
        store: ObjectStore,
        *,
        claim_check_threshold_bytes: int,
        allowed_roots: Sequence[str] = (),
        leave: Collection[str] = (),
    ) -> None:
        self._store, self._leave = store, leave
        self.threshold_bytes = claim_check_threshold_bytes
        self._roots = AllowedRoots.for_store(store.uri(""), allowed_roots)

    def check_in(self, event: EventT, *, policy_version: int | None) -> EventT:
        """Store arrays above the limit with the objects of the version."""
        folder = "" if policy_version is None else build_version_folder(policy_version)
        return check_in(
            event,
            self._store,
            claim_check_threshold_bytes=self.threshold_bytes,
            folder=folder,
        )

    def open_ahead(self) -> ArraysAhead:
        """Return what fetches the stored arrays that the role needs, in threads, and hands them
        out after checking that all media of their event are at an allowed location.
        """
        return ArraysAhead(self._store, leave=self._leave, check=self._roots.check)


def open_store(config: RunConfig, *, waits: bool = True) -> ObjectStore:
    """Open the run's object store.

    Args:
        config: The run.
        waits: Whether the worker blocks while the store is unavailable.
    """
    return ObjectStore.open(config.objects_uri, uri_aliases=config.objects.uri_aliases, waits=waits)


def open_worker(
    role: str,
    config: RunConfig,
    *,
    index: int,
    store: ObjectStore | None = None,
    follow: Sequence[str] = (),
    num_versions: int = RECENT_VERSIONS,
    control_wait: FetchWait | None = None,
) -> Worker:
    """Return the worker of a role, which drains on signals. Use it as a context manager.

    Resources of an earlier process with its name are released.

    Args:
        role: The role.
        config: The run.
        index: Which of the role's workers.
        store: The run's object store, if it is open already.
        follow: Control topics to follow, besides the topics of every worker.
        num_versions: Minimum number of newest versions to read.
        control_wait: The `wait` of its `ControlFollower`; by the number of workers if None.
    Raises:
        ConfigError: The object store is another run's, or the run file has changed since the
            run's description on the log, in a way that can't be resumed.
    """
    opened = store or open_store(config)
    worker = Worker(
        role,
        config,
        claim_check=_build_claim_check(role, config.objects, opened),
        index=index,
        follow=follow,
        num_versions=num_versions,
        control_wait=control_wait,
    )
    try:
        _register_error_metrics(worker)
        worker.lifecycle.wait_for_stores(outages, deadline_seconds=OUTAGE_DEADLINE_SECONDS)
        descriptions = [
            event for event in worker.control.follower.history if isinstance(event, RunDescribed)
        ]
        claim_store(
            opened,
            run_id=config.run.id,
            cluster_id=worker.control.follower.cluster_id,
            logged_marker=find_logged_marker(descriptions),
        )
        if (host := current_host()) is None:
            worker.drain.listen_to_signals()
        else:
            host.drain.on_start(worker.drain.start)
        if descriptions:
            refuse_changes(config.run.id, find_changes(descriptions[-1], config), is_accepted=True)
        if ROLE_PERMISSIONS[role].is_member:
            evict_predecessors(worker.connection, worker.plan.consumer_group(role))
    except BaseException:
        worker.close()
        raise
    return worker


def _build_claim_check(role: str, objects: ObjectsConfig, store: ObjectStore) -> StoreClaimCheck:
    """Return the claim check of a role, which fetches the arrays that the role reads, and stores
    none where the role may not write.
    """
    may_store = SAMPLES in ROLE_STORE_RIGHTS[role].writes
    threshold_bytes = objects.claim_check_threshold_bytes if may_store else sys.maxsize
    return StoreClaimCheck(
        store,
        claim_check_threshold_bytes=threshold_bytes,
        allowed_roots=objects.allowed_roots,
        leave=UNREAD_ARRAYS.get(role, UNREAD_BY_OTHERS),
    )


def _register_error_metrics(worker: Worker) -> None:
    """Export the errors of the worker's Kafka clients and object stores."""
    worker.metrics.registry.register(
        ErrorMetrics(
            worker.role,
            broker=worker.connection.errors,
            objects=object_errors,
            away_seconds=lambda: outages.seconds,
        )
    )
