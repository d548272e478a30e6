"""Sends each policy version to the engines that are present, beside the trainer's work.

    trainer's step        offer(tensors)  --> returns at once                 the store has the version: settle(digest)
    one thread a link     another engine joins, or leaves --> a new list on the control log
                          version --> taken? --> buckets --> does the engine hold what we hold?

A link waits for its engine alone, and within a deadline. An engine that refuses, hangs or dies
loses its link, and nobody else notices: it takes the version from the store, and joins again.
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
from relax_events.events.types import EnginesEnlisted
from relax_events.telemetry.component_metrics import WeightMetrics
from relax_events.telemetry.redaction import hide
from relax_events.weights.broadcast.buckets import Layout
from relax_events.weights.broadcast.control_socket import ControlSocket
from relax_events.weights.broadcast.engine_connection import EngineConnection, WeightsSnapshot
from relax_events.weights.broadcast.process_groups import serve_rendezvous, require_backend

log = structlog.get_logger()
MAX_PENDING_VERSIONS = 2
"""Versions held in memory at a time because an engine is not done with them; the next one goes by
the store alone."""
CLOSE_SECONDS = 2.0
"""What ending a link takes besides the bucket that is under way."""


class Broadcaster:
    """See the module's docstring. `offer` and `close` are the trainer's thread's."""

    def __init__(
        self,
        config: WeightsConfig,
        *,
        metrics: WeightMetrics,
        announce: Callable[[EnginesEnlisted], None],
        last_list: int = 0,
    ) -> None:
        """Listen for engines, and say on the log where.

        Args:
            config: What moves the tensors (not `store`), address, sizes and deadlines.
            metrics: The trainer's.
            announce: Writes a list to the control log; called by any thread, one at a time.
            last_list: Version of the newest list there.
        Raises:
            EnvironmentProblem: The backend has not what it needs, or the address is not this
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
        meeting = listening_socket(config.host)
        self.rendezvous_port: int = meeting.getsockname()[1]
        self._meetings: Store | None = serve_rendezvous(
            meeting, timeout_seconds=config.deadline_seconds
        )
        self._lock, self._telling = threading.Lock(), threading.Lock()
        self._links: list[EngineConnection] = []
        self._enlisted: list[EngineConnection] = []
        self._num_links = 0
        self._announce_members()
        threading.Thread(target=self._accept_connections, name="broadcast", daemon=True).start()

    def offer(self, tensors: Mapping[str, Tensor], *, policy_version: int) -> WeightsSnapshot | None:
        """Have a version sent to every engine that is present; None when there is none, or they are
        too far behind.

        Args:
            tensors: On the CPU; nobody may change them any more.
            policy_version: Above all earlier ones.
        """
        with self._lock:
            links = list(self._enlisted)
        if not links:
            return None
        under_way = {id(link.sending) for link in links if link.sending is not None}
        if len(under_way) >= MAX_PENDING_VERSIONS:
            self.metrics.failed("skipped")
            log.warning(
                "weights.skipped",
                policy_version=policy_version,
                num_versions_under_way=len(under_way),
            )
            return None
        snapshot = WeightsSnapshot(policy_version, tensors, Layout.from_tensors(tensors))
        for link in links:
            link.offer(snapshot)
        return snapshot

    @property
    def engines(self) -> list[str]:
        """Workers whose engines are sent new versions, sorted."""
        with self._lock:
            return sorted({link.worker_id for link in self._enlisted})

    def add_member(self, link: EngineConnection) -> None:
        """Note that an engine has joined."""
        with self._lock:
            self._enlisted.append(link)
        self._announce_members()

    def remove(self, link: EngineConnection) -> None:
        """Note that an engine is gone, if it had joined."""
        with self._lock:
            self._links.remove(link)
            was_enlisted = link in self._enlisted
            self._enlisted = [other for other in self._enlisted if other is not link]
        if was_enlisted and not self._is_closed:
            self._announce_members()

    def close(self) -> None:
        """End all links, whatever is under way on them."""
        self._is_closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            links = list(self._links)
        deadline = Deadline(self.config.stall_seconds + CLOSE_SECONDS)
        for link in links:
            link.shut_down()
        for link in links:
            link.thread.join(deadline.remaining_seconds)
        self._meetings = None  # its port is free as soon as nobody holds it

    def _accept_connections(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # we were closed
                return
            with self._lock:
                self._num_links += 1
                link = EngineConnection(self, ControlSocket(connection), group=str(self._num_links))
                self._links.append(link)
            link.thread.start()

    def _announce_members(self) -> None:
        """Write the list as it is, one at a time; a log that is slow to take it holds up no
        step.
        """
        with self._telling:
            self._list_version += 1
            engines = self.engines
            self.metrics.engines(len(engines))
            self._announce(
                EnginesEnlisted(
                    list_version=self._list_version,
                    transport=self.backend,
                    address=self._address,
                    ticket=self.join_token,
                    engines=engines,
                )
            )
            log.info("engines.enlisted", list_version=self._list_version, engines=engines)


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
