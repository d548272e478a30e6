"""Starts and ends a run's elastic workers on Kubernetes, where each elastic role is a StatefulSet:
what `relax run` does on its own machine.

The worker with index 3 is the pod with ordinal 3. A StatefulSet adds and removes its last pods, so
workers are added and removed by their number alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Protocol

import structlog

from relax_events.controller.kubernetes_client import Replicas
from relax_events.controller.scaling_bounds import ScalingBounds
from relax_events.errors import EnvironmentProblem
from relax_events.events.parts import WorkerState
from relax_events.events.types import RunCommanded
from relax_events.projections.scaling import DesiredState, ElasticWorker, ExitReason, ScaleState

log = structlog.get_logger()
POLL_SECONDS, RETRY_SECONDS = 2.0, 15.0


class ReplicasClient(Protocol):
    """Reads and sets the replicas of StatefulSets; raises EnvironmentProblem."""

    def read_replicas(self, name: str) -> Replicas:
        """Return the replicas of a StatefulSet."""

    def set_replicas(self, name: str, number: int) -> Replicas:
        """Set how many replicas a StatefulSet should have."""


def count_wanted(state: ScaleState, role: str, *, num_at_start: int) -> int:
    """Return how many workers a role should have: none once the run is over."""
    if state.is_over:
        return 0
    return num_at_start + sum(
        worker.role == role and worker.desired_state is DesiredState.RUNNING
        for worker in state.workers.values()
    )


def find_exits(
    state: ScaleState, role: str, replicas: Replicas
) -> Iterator[tuple[ElasticWorker, ExitReason, str]]:
    """Return the leaving workers whose pods are gone, with how and why they exited."""
    for worker in state.workers.values():
        index = int(worker.worker_id.rpartition("-")[2])
        if (
            worker.role != role
            or worker.desired_state is not DesiredState.LEAVING
            or index < max(replicas.wanted, replicas.existing)
        ):
            continue
        heartbeat = state.last_heartbeats.get(worker.worker_id)
        if heartbeat is None:
            yield worker, ExitReason.ABSENT, "its pod is gone, and it had not started"
        elif heartbeat.state is WorkerState.STOPPED:
            yield worker, ExitReason.DRAINED, "it drained"
        else:
            yield worker, ExitReason.KILLED, "its pod is gone, and it had not drained"


class KubernetesScaler:
    """Sets the replicas of each elastic role's StatefulSet. Used by the controller's thread."""

    def __init__(
        self, client: ReplicasClient, release: str, bounds: ScalingBounds, state: ScaleState
    ) -> None:
        """Scale nothing yet.

        Args:
            client: Of the Kubernetes API.
            release: A role's StatefulSet is named RELEASE-ROLE.
            bounds: Of the run.
            state: The folded log.
        """
        self._client, self._release, self._state = client, release, state
        self._pools = list(bounds.pools.values())
        self._look_after = 0.0
        self._wanted: dict[str, int] = {}

    def reconcile(self) -> list[RunCommanded]:
        """Set the replicas where they differ from what the log wants, and return the exits of
        workers that are gone.

        StatefulSets are read every two seconds, and at once when another number is wanted. A call
        that fails is logged and repeated.
        """
        wanted = {
            pool.role: count_wanted(self._state, pool.role, num_at_start=pool.num_at_start)
            for pool in self._pools
        }
        if wanted == self._wanted and time.monotonic() < self._look_after:
            return []
        self._wanted, self._look_after = wanted, time.monotonic() + POLL_SECONDS
        try:
            return list(self._exits(wanted.items()))
        except EnvironmentProblem as error:
            self._look_after = time.monotonic() + RETRY_SECONDS
            log.warning("workers.scale_failed", error=str(error))
            return []

    def _exits(self, wanted: Iterable[tuple[str, int]]) -> Iterator[RunCommanded]:
        for role, number in wanted:
            name = f"{self._release}-{role}"
            replicas = self._client.read_replicas(name)
            if replicas.wanted != number:
                log.info("workers.scaled", role=role, number=number, before=replicas.wanted)
                replicas = self._client.set_replicas(name, number)
            for worker, departure, reason in find_exits(self._state, role, replicas):
                yield worker.exit_command(departure, reason)
