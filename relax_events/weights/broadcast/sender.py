"""Sends each policy version to the connected engines while the trainer continues.

    trainer's step               offer(tensors)  --> returns at once     the store has the version:
    its digest is set one thread per connection    engine joins or leaves --> new member list on the
    control log
                                 version --> accepted? --> buckets --> compare digests

A connection waits for its own engine only, within a deadline. An engine that refuses, hangs or dies
loses its connection; it then reads the version from the store and joins again. Other engines are
not affected.
"""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress

import structlog
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from relax_events.config import WeightsConfig
from relax_events.deadline import Deadline
from relax_events.errors import EnvironmentProblem
from relax_events.events.types import BroadcastMembership
from relax_events.secret_handling import hide
from relax_events.telemetry.component_metrics import WeightMetrics
from relax_events.weights.broadcast.buckets import Layout
from relax_events.weights.broadcast.control_socket import ControlSocket
from relax_events.weights.broadcast.engine_connection import EngineConnection, WeightsSnapshot
from relax_events.weights.broadcast.process_groups import require_backend, serve_rendezvous

log = structlog.get_logger()
MAX_PENDING_VERSIONS = 2
"""Versions kept in memory because an engine is still receiving them; the next one is published to
the store only."""
CLOSE_SECONDS = 2.0
"""Time to close a connection, in addition to its pending bucket."""


class Broadcaster:
    """See the module's docstring. The trainer's thread calls `offer` and `close`."""

    def __init__(
        self,
        config: WeightsConfig,
        *,
        metrics: WeightMetrics,
        announce: Callable[[BroadcastMembership], None],
        last_list: int = 0,
    ) -> None:
        """Listen for engines and announce the address on the control log.

        Args:
            config: Transport (not `store`), address, sizes and deadlines.
            metrics: The trainer's.
            announce: Writes a member list to the control log; called from any thread, one call at a
                time.
            last_list: Version of the newest member list there.
        Raises:
            EnvironmentProblem: The backend's requirements are not met, or the address is not this
                machine's.
        """
        self.backend = require_backend(config.transport)
        self.config, self.metrics = config, metrics
        self.join_token = secrets.token_hex(16)
        hide(self.join_token)
        self._announce, self._list_version = announce, last_list
        self._listener = listening_socket(config.host)
        self._address = f"{config.host}:{self._listener.getsockname()[1]}"
        self._is_closed = False
        rendezvous = listening_socket(config.host)
        self.rendezvous_port: int = rendezvous.getsockname()[1]
        self._rendezvous_store: Store | None = serve_rendezvous(
            rendezvous, timeout_seconds=config.deadline_seconds
        )
        self._lock, self._announce_lock = threading.Lock(), threading.Lock()
        self._connections: list[EngineConnection] = []
        self._members: list[EngineConnection] = []
        self._num_connections = 0
        self._announce_members()
        threading.Thread(target=self._accept_connections, name="broadcast", daemon=True).start()

    def offer(
        self, tensors: Mapping[str, Tensor], *, policy_version: int
    ) -> WeightsSnapshot | None:
        """Send a version to every connected engine; return None if none is connected or too many
        versions are pending.

        Args:
            tensors: On the CPU; the caller must not change them afterwards.
            policy_version: Higher than all earlier ones.
        """
        with self._lock:
            members = list(self._members)
        if not members:
            return None
        pending = {
            id(connection.sending) for connection in members if connection.sending is not None
        }
        if len(pending) >= MAX_PENDING_VERSIONS:
            self.metrics.count_broadcast_failure("skipped")
            log.warning(
                "weights.skipped",
                policy_version=policy_version,
                num_pending_versions=len(pending),
            )
            return None
        snapshot = WeightsSnapshot(policy_version, tensors, Layout.from_tensors(tensors))
        for connection in members:
            connection.offer(snapshot)
        return snapshot

    @property
    def engines(self) -> list[str]:
        """Ids of the workers whose engines receive new versions, sorted."""
        with self._lock:
            return sorted({connection.worker_id for connection in self._members})

    def add_member(self, connection: EngineConnection) -> None:
        """Add an engine that has joined."""
        with self._lock:
            self._members.append(connection)
        self._announce_members()

    def remove(self, connection: EngineConnection) -> None:
        """Remove a connection that has ended."""
        with self._lock:
            self._connections.remove(connection)
            was_member = connection in self._members
            self._members = [other for other in self._members if other is not connection]
        if was_member and not self._is_closed:
            self._announce_members()

    def close(self) -> None:
        """Close all connections and abort their transfers."""
        self._is_closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            connections = list(self._connections)
        deadline = Deadline(self.config.stall_seconds + CLOSE_SECONDS)
        for connection in connections:
            connection.shut_down()
        for connection in connections:
            connection.thread.join(deadline.remaining_seconds)
        self._rendezvous_store = None  # dropping the store frees its port

    def _accept_connections(self) -> None:
        while True:
            try:
                accepted, _ = self._listener.accept()
            except OSError:  # the broadcaster was closed
                return
            with self._lock:
                self._num_connections += 1
                connection = EngineConnection(
                    self, ControlSocket(accepted), group=str(self._num_connections)
                )
                self._connections.append(connection)
            connection.thread.start()

    def _announce_members(self) -> None:
        """Write the member list to the control log, one write at a time. A slow log delays no train
        step.
        """
        with self._announce_lock:
            self._list_version += 1
            engines = self.engines
            self.metrics.set_broadcast_engines(len(engines))
            self._announce(
                BroadcastMembership(
                    membership_version=self._list_version,
                    transport=self.backend,
                    address=self._address,
                    join_token=self.join_token,
                    worker_ids=engines,
                )
            )
            log.info(
                "broadcast_membership.published",
                membership_version=self._list_version,
                engines=engines,
            )


def listening_socket(host: str) -> socket.socket:
    """Listen on a free port of an address.

    Raises:
        EnvironmentProblem: It is not this machine's.
    """
    try:
        return socket.create_server((host, 0))
    except OSError as error:
        raise EnvironmentProblem(
            f"weights.host = {host!r} must be an address of the trainer's machine: {error}"
        ) from error
