"""Takes policy versions from the trainer, beside the engine's work, and keeps the newest until it
is asked for.

    control log      a list says where the trainer is --> join: a line, a group of two
    own thread       a version comes --> row of bytes, its digest taken bucket by bucket --> kept; the worker is woken
    worker's thread  take(version, digest) --> its tensors, if they are those that the published
    artifact names

A version that arrives is nobody's before its artifact is published. What is not whole by the
deadline is dropped, and the line with it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import structlog
from torch import Tensor

from relax_events.config import WeightsConfig
from relax_events.deadline import Deadline
from relax_events.errors import EnvironmentProblem
from relax_events.events.types import EnginesEnlisted
from relax_events.runtime.failpoints import failpoint
from relax_events.telemetry.component_metrics import WeightMetrics
from relax_events.telemetry.redaction import hide
from relax_events.weights.broadcast.buckets import BufferDigest, Layout
from relax_events.weights.broadcast.channel import (
    MAX_PENDING_BUCKETS,
    Channel,
    ConnectionLost,
    Transfer,
)
from relax_events.weights.broadcast.control_socket import ControlSocket
from relax_events.weights.broadcast.process_groups import Rendezvous, open_channel, require_backend
from relax_events.weights.broadcast.receive_buffers import ReceiveBuffer
from relax_events.weights.broadcast.shared_memory import SameHostProbe, SharedMemoryChannel

log = structlog.get_logger()
RETRY_SECONDS = 2.0
"""Wait before a trainer that was lost is asked again; twice as long each time that it does not take
us in."""
MAX_RETRY_SECONDS = 60.0
CLOSE_SECONDS = 2.0
"""What leaving takes besides the bucket that is under way."""


@dataclass(frozen=True, slots=True)
class ReceivedVersion:
    """A version that came, unproven: whether it is what was published is for the digest to say."""

    policy_version: int
    layout: Layout
    buffer: ReceiveBuffer
    digest: bytes
    transport: str
    """How it came."""


class Receiver:
    """See the module's docstring. It holds two rows: one is received into, the other one is the
    engine's until it takes the next.
    """

    def __init__(self, worker_id: str, config: WeightsConfig, *, metrics: WeightMetrics) -> None:
        """Do nothing until `start`.

        Args:
            worker_id: Names us to the trainer.
            config: Deadlines; the rest is the trainer's to say.
            metrics: Of this worker.
        """
        self._worker_id, self._config, self._metrics = worker_id, config, metrics
        self._wake: Callable[[], None] = lambda: None
        self._changed = threading.Condition()
        self._list: EnginesEnlisted | None = None
        self._lost_ticket = ""
        self._retry_at, self._retry_seconds = 0.0, RETRY_SECONDS
        self._layout: Layout | None = None
        self._served_version = -1
        self._coming_version = -1
        self._arrived: ReceivedVersion | None = None
        self._free_buffers: list[ReceiveBuffer] = []
        self._handed_out: ReceivedVersion | None = None
        self._line: ControlSocket | None = None
        self._pair: Channel | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="broadcast", daemon=True)

    def start(self, wake: Callable[[], None]) -> None:
        """Join whenever there is a trainer.

        Args:
            wake: Called, from our thread, when a version has come or will not come any more.
        """
        self._wake = wake
        self._thread.start()

    def apply(self, enlisted: EnginesEnlisted) -> None:
        """Take note of a list; a trainer that is new is asked at once. One of a trainer that was
        replaced comes late, and counts for nothing.
        """
        with self._changed:
            if self._list is not None and enlisted.list_version <= self._list.list_version:
                return
            if self._list is None or enlisted.ticket != self._list.ticket:
                hide(enlisted.ticket)
                if self._line is not None:  # to a trainer that is none any more
                    self._line.shut_down()
            self._list = enlisted
            self._changed.notify_all()

    @property
    def transport(self) -> str:
        """How the tensors that were taken last have come."""
        return self._handed_out.transport if self._handed_out is not None else ""

    def loaded_from_store(self, policy_version: int, tensors: Mapping[str, Tensor]) -> None:
        """Take note of the version that was taken from the store; what the trainer sends must be
        laid out as it is.
        """
        with self._changed:
            self._served_version = policy_version
            if self._layout is None:
                self._layout = Layout.from_tensors(tensors)
                self._changed.notify_all()

    def is_in_transit(self, policy_version: int) -> bool:
        """Tell whether a version is under way at this instant."""
        return self._coming_version == policy_version

    def take(self, policy_version: int, digest: bytes | None) -> Mapping[str, Tensor] | None:
        """Give the tensors of a version if they have come and have this `artifacts.transit_digest`;
        they stay as they are until the next is taken.
        """
        with self._changed:
            arrived, self._arrived = self._arrived, None
            if arrived is None or arrived.policy_version != policy_version:
                self._arrived = (
                    arrived
                    if arrived is not None and arrived.policy_version > policy_version
                    else None
                )
                return None
            if digest is None or arrived.digest != digest:
                self._free_buffers.append(arrived.buffer)
                self._metrics.failed("torn")
                log.error(
                    "weights.torn",
                    policy_version=policy_version,
                    digest=arrived.digest.hex(),
                    published=digest.hex() if digest else "none",
                )
                return None
            if self._handed_out is not None:
                self._free_buffers.append(self._handed_out.buffer)
            self._handed_out, self._served_version = arrived, policy_version
        return arrived.layout.views(arrived.buffer.data)

    def close(self) -> None:
        """Leave the trainer."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            if self._line is not None:
                self._line.shut_down()
            if self._pair is not None:
                self._pair.abort()
        if self._thread.ident is not None:
            self._thread.join(self._config.stall_seconds + CLOSE_SECONDS)

    def _run(self) -> None:
        while (enlisted := self._wait_for_trainer()) is not None:
            try:
                self._join(enlisted)
            except (ConnectionLost, EnvironmentProblem) as error:
                with self._changed:
                    self._line, self._pair = None, None
                    self._lost_ticket, self._retry_at = (
                        enlisted.ticket,
                        time.monotonic() + self._retry_seconds,
                    )
                    self._retry_seconds = min(2 * self._retry_seconds, MAX_RETRY_SECONDS)
                    is_closed = self._is_closed
                if not is_closed:
                    log.warning("broadcast.lost", address=enlisted.address, error=str(error))
                    self._wake()

    def _wait_for_trainer(self) -> EnginesEnlisted | None:
        """Wait until a trainer is known, is due to be asked, and can send us something that we
        know; None when we are closed.
        """
        with self._changed:
            while not self._is_closed:
                enlisted = self._list if self._layout is not None else None
                is_lost = enlisted is not None and enlisted.ticket == self._lost_ticket
                wait_seconds = self._retry_at - time.monotonic() if is_lost else 0.0
                if enlisted is not None and wait_seconds <= 0:
                    return enlisted
                self._changed.wait(wait_seconds or None)
        return None

    def _join(self, enlisted: EnginesEnlisted) -> None:
        """Join a trainer's engines, and take what it sends until one of us leaves.

        Raises:
            LinkLost: One of us has left.
            EnvironmentProblem: This machine has not what the trainer's backend needs.
        """
        host, _, port = enlisted.address.rpartition(":")
        deadline = Deadline(self._config.deadline_seconds)
        with ControlSocket.connect(host, int(port), deadline=deadline) as line:
            self._set_connection(line=line)
            sample = SameHostProbe() if self._config.use_shared_memory else None
            line.send(
                deadline=deadline,
                ticket=enlisted.ticket,
                worker_id=self._worker_id,
                memory=sample.handle if sample else None,
            )
            terms = JoinReply.parse(line.receive(deadline))
            pair = self._open_channel(terms, line, host=host, deadline=deadline)
            try:
                self._set_connection(line=line, pair=pair)
                self._retry_seconds = RETRY_SECONDS
                log.info("broadcast.joined", address=enlisted.address, way=terms.transport)
                while True:
                    self._handle_offer(line.receive(), line, pair, terms)
            finally:
                pair.abort()

    def _open_channel(self, terms: JoinReply, line: ControlSocket, *, host: str, deadline: Deadline) -> Channel:
        if terms.transport == "memory":
            return SharedMemoryChannel(line)
        backend = require_backend(terms.transport)
        return open_channel(
            backend,
            Rendezvous(host, terms.rendezvous_port, terms.group),
            rank=1,
            host=line.own_host,
            deadline=deadline,
        )

    def _set_connection(self, *, line: ControlSocket, pair: Channel | None = None) -> None:
        with self._changed:
            self._line, self._pair = line, pair
            if self._is_closed:
                line.shut_down()

    def _handle_offer(self, offer: Mapping[str, Any], line: ControlSocket, pair: Channel, terms: JoinReply) -> None:
        """Take a version that is offered, or say why not."""
        deadline = Deadline(self._config.deadline_seconds)
        version, layout = offer.get("policy_version"), self._layout
        if not isinstance(version, int) or layout is None or version <= self._served_version:
            line.send(
                deadline=deadline, takes=False, reason=f"version {self._served_version} is here"
            )
            return
        if offer.get("layout") != layout.digest:
            with self._changed:
                self._layout = None  # whoever loads the version from the store sees what is in it
            self._metrics.failed("refused")
            line.send(
                deadline=deadline,
                takes=False,
                reason="its tensors are others than those of the version before",
            )
            raise ConnectionLost(f"policy version {version} has other tensors than the version before")
        row = self._open_buffer(version, layout)
        try:
            line.send(deadline=deadline, takes=True, row=pair.prepare_receive(row))
            digest = self._receive_buckets(
                pair,
                row.data,
                layout,
                buckets=layout.buckets(max_bytes=terms.bucket_bytes),
                deadline=deadline,
            )
            with self._changed:
                self._arrived, self._coming_version = (
                    ReceivedVersion(version, layout, row, digest, terms.transport),
                    -1,
                )
        except ConnectionLost:
            self._metrics.failed("lost")
            raise
        finally:
            self._coming_version = -1
        self._metrics.moved(layout.num_bytes, transport=terms.transport)
        self._wake()
        line.send(deadline=deadline, digest=digest.hex())

    def _receive_buckets(
        self,
        pair: Channel,
        row: Tensor,
        layout: Layout,
        *,
        buckets: Sequence[range],
        deadline: Deadline,
    ) -> bytes:
        """Receive a version's buckets, and give the digest of its tensors, which is taken of one
        bucket while the next ones come.

        Raises:
            LinkLost: They did not come in time.
        """
        digest, ahead, under_way = BufferDigest(layout, row), iter(buckets), deque[Transfer]()
        for bucket in buckets:
            for coming in islice(ahead, MAX_PENDING_BUCKETS - len(under_way)):
                under_way.append(
                    pair.receive(
                        row[coming.start : coming.stop], deadline.within(self._config.stall_seconds)
                    )
                )
            under_way.popleft().wait()
            failpoint("rollout.receiving")
            digest.update(bucket)
        return digest.value()

    def _open_buffer(self, policy_version: int, layout: Layout) -> ReceiveBuffer:
        """Give a row to receive into; what had come before and was not taken is passed over."""
        with self._changed:
            self._coming_version = policy_version
            if self._arrived is not None:
                self._free_buffers.append(self._arrived.buffer)
                self._arrived = None
            fitting = [row for row in self._free_buffers if len(row.data) == layout.num_bytes]
            self._free_buffers = fitting[1:]
        return fitting[0] if fitting else ReceiveBuffer(layout.num_bytes)


@dataclass(frozen=True, slots=True)
class JoinReply:
    """What a trainer says to an engine that it takes in."""

    transport: str
    rendezvous_port: int
    group: str
    bucket_bytes: int

    @classmethod
    def parse(cls, message: Mapping[str, Any]) -> JoinReply:
        """Read them.

        Raises:
            LinkLost: They are incomplete.
        """
        try:
            terms = cls(
                str(message["way"]),
                int(message["meeting_port"]),
                str(message["group"]),
                int(message["bucket_bytes"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ConnectionLost(
                f"the trainer's terms can't be read: {dict(message)}: {error}"
            ) from error
        return terms
