"""Receives policy versions from the trainer while the engine works, and keeps the newest until it
is fetched.

    control log      a member list announces the trainer's address --> join: control socket, channel
    own thread       a version arrives --> buffer, digest taken bucket by bucket --> kept; the
    worker is woken worker's thread  take(version, digest) --> its tensors, if they match the
    published artifact

A received version is not used before its artifact is published. A version that is incomplete at its
deadline is dropped, and the connection is closed.
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
from relax_events.events.types import BroadcastMembership
from relax_events.runtime.failpoints import failpoint
from relax_events.secret_handling import hide
from relax_events.telemetry.component_metrics import WeightMetrics
from relax_events.weights.broadcast.buckets import BufferDigest, Layout
from relax_events.weights.broadcast.channel import (
    MAX_PENDING_BUCKETS,
    Channel,
    ConnectionLost,
    ReceiveBuffer,
    Transfer,
)
from relax_events.weights.broadcast.control_socket import ControlSocket
from relax_events.weights.broadcast.process_groups import Rendezvous, open_channel, require_backend
from relax_events.weights.broadcast.shared_memory import SameHostProbe, SharedMemoryChannel

log = structlog.get_logger()
RETRY_SECONDS = 2.0
"""Wait before reconnecting to a lost trainer; doubled after each failed attempt."""
MAX_RETRY_SECONDS = 60.0
CLOSE_SECONDS = 2.0
"""Time to disconnect, in addition to the pending bucket."""


@dataclass(frozen=True, slots=True)
class ReceivedVersion:
    """A received version whose digest was not yet compared with the published one."""

    policy_version: int
    layout: Layout
    buffer: ReceiveBuffer
    digest: bytes
    transport: str
    """Name of the transport that sent it."""


class Receiver:
    """See the module's docstring. It holds two buffers: one is received into, the engine uses the
    other one until it takes the next version.
    """

    def __init__(self, worker_id: str, config: WeightsConfig, *, metrics: WeightMetrics) -> None:
        """Create the receiver; `start` starts it.

        Args:
            worker_id: Id of this worker.
            config: Deadlines; the trainer sends the other settings.
            metrics: Of this worker.
        """
        self._worker_id, self._config, self._metrics = worker_id, config, metrics
        self._wake: Callable[[], None] = lambda: None
        self._condition = threading.Condition()
        self._list: BroadcastMembership | None = None
        self._lost_token = ""
        self._retry_at, self._retry_seconds = 0.0, RETRY_SECONDS
        self._layout: Layout | None = None
        self._loaded_version = -1
        self._incoming_version = -1
        self._received: ReceivedVersion | None = None
        self._free_buffers: list[ReceiveBuffer] = []
        self._in_use: ReceivedVersion | None = None
        self._control: ControlSocket | None = None
        self._channel: Channel | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="broadcast", daemon=True)

    def start(self, wake: Callable[[], None]) -> None:
        """Join whenever a trainer is announced.

        Args:
            wake: Called from the receiver's thread when a version has arrived or the connection was
                lost.
        """
        self._wake = wake
        self._thread.start()

    def apply(self, enlisted: BroadcastMembership) -> None:
        """Apply a member list; join a new trainer at once. A late list of a replaced trainer is
        ignored.
        """
        with self._condition:
            if (
                self._list is not None
                and enlisted.membership_version <= self._list.membership_version
            ):
                return
            if self._list is None or enlisted.join_token != self._list.join_token:
                hide(enlisted.join_token)
                if self._control is not None:  # of a replaced trainer
                    self._control.shut_down()
            self._list = enlisted
            self._condition.notify_all()

    @property
    def transport(self) -> str:
        """Transport of the version that was taken last."""
        return self._in_use.transport if self._in_use is not None else ""

    def loaded_from_store(self, policy_version: int, tensors: Mapping[str, Tensor]) -> None:
        """Record the version that was read from the store; versions that the trainer sends must
        have its layout.
        """
        with self._condition:
            self._loaded_version = policy_version
            if self._layout is None:
                self._layout = Layout.from_tensors(tensors)
                self._condition.notify_all()

    def is_in_transit(self, policy_version: int) -> bool:
        """Return whether a version is being received now."""
        return self._incoming_version == policy_version

    def take(self, policy_version: int, digest: bytes) -> Mapping[str, Tensor] | None:
        """Return the tensors of a version if it was received and has this `weights_digest`. They
        stay valid until the next version is taken.
        """
        with self._condition:
            arrived, self._received = self._received, None
            if arrived is None or arrived.policy_version != policy_version:
                self._received = (
                    arrived
                    if arrived is not None and arrived.policy_version > policy_version
                    else None
                )
                return None
            if arrived.digest != digest:
                self._free_buffers.append(arrived.buffer)
                self._metrics.count_broadcast_failure("torn")
                log.error(
                    "weights.corrupted",
                    policy_version=policy_version,
                    digest=arrived.digest.hex(),
                    published=digest.hex(),
                )
                return None
            if self._in_use is not None:
                self._free_buffers.append(self._in_use.buffer)
            self._in_use, self._loaded_version = arrived, policy_version
        return arrived.layout.views(arrived.buffer.data)

    def close(self) -> None:
        """Leave the broadcast."""
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()
            if self._control is not None:
                self._control.shut_down()
            if self._channel is not None:
                self._channel.abort()
        if self._thread.ident is not None:
            self._thread.join(self._config.stall_seconds + CLOSE_SECONDS)

    def _run(self) -> None:
        while (enlisted := self._wait_for_trainer()) is not None:
            try:
                self._join(enlisted)
            except (ConnectionLost, EnvironmentProblem) as error:
                with self._condition:
                    self._control, self._channel = None, None
                    self._lost_token, self._retry_at = (
                        enlisted.join_token,
                        time.monotonic() + self._retry_seconds,
                    )
                    self._retry_seconds = min(2 * self._retry_seconds, MAX_RETRY_SECONDS)
                    is_closed = self._is_closed
                if not is_closed:
                    log.warning("broadcast.lost", address=enlisted.address, error=str(error))
                    self._wake()

    def _wait_for_trainer(self) -> BroadcastMembership | None:
        """Wait until a trainer is known and due for a connection attempt, and the layout of its
        versions is known; return None when closed.
        """
        with self._condition:
            while not self._is_closed:
                enlisted = self._list if self._layout is not None else None
                is_lost = enlisted is not None and enlisted.join_token == self._lost_token
                wait_seconds = self._retry_at - time.monotonic() if is_lost else 0.0
                if enlisted is not None and wait_seconds <= 0:
                    return enlisted
                self._condition.wait(wait_seconds or None)
        return None

    def _join(self, enlisted: BroadcastMembership) -> None:
        """Join a trainer, and receive versions until either side disconnects.

        Raises:
            ConnectionLost: A side has disconnected.
            EnvironmentProblem: This machine lacks a requirement of the trainer's backend.
        """
        host, _, port = enlisted.address.rpartition(":")
        deadline = Deadline(self._config.deadline_seconds)
        with ControlSocket.connect(host, int(port), deadline=deadline) as control:
            self._set_connection(control=control)
            probe = SameHostProbe() if self._config.use_shared_memory else None
            control.send(
                deadline=deadline,
                join_token=enlisted.join_token,
                worker_id=self._worker_id,
                memory=probe.handle if probe else None,
            )
            reply = JoinReply.parse(control.receive(deadline))
            channel = self._open_channel(reply, control, host=host, deadline=deadline)
            try:
                self._set_connection(control=control, channel=channel)
                self._retry_seconds = RETRY_SECONDS
                log.info("broadcast.joined", address=enlisted.address, transport=reply.transport)
                while True:
                    self._handle_offer(control.receive(), control, channel, reply)
            finally:
                channel.abort()

    def _open_channel(
        self, reply: JoinReply, control: ControlSocket, *, host: str, deadline: Deadline
    ) -> Channel:
        if reply.transport == "memory":
            return SharedMemoryChannel(control)
        backend = require_backend(reply.transport)
        return open_channel(
            backend,
            Rendezvous(host, reply.rendezvous_port, reply.group),
            rank=1,
            host=control.own_host,
            deadline=deadline,
        )

    def _set_connection(self, *, control: ControlSocket, channel: Channel | None = None) -> None:
        with self._condition:
            self._control, self._channel = control, channel
            if self._is_closed:
                control.shut_down()

    def _handle_offer(
        self, offer: Mapping[str, Any], control: ControlSocket, channel: Channel, reply: JoinReply
    ) -> None:
        """Receive an offered version, or decline it with a reason."""
        deadline = Deadline(self._config.deadline_seconds)
        version, layout = offer.get("policy_version"), self._layout
        if not isinstance(version, int) or layout is None or version <= self._loaded_version:
            control.send(
                deadline=deadline, accepts=False, reason=f"version {self._loaded_version} is loaded"
            )
            return
        if offer.get("layout") != layout.digest:
            with self._condition:
                self._layout = None  # set again when a version is read from the store
            self._metrics.count_broadcast_failure("refused")
            control.send(
                deadline=deadline,
                accepts=False,
                reason="its tensors differ from the previous version's tensors",
            )
            raise ConnectionLost(
                f"policy version {version} has other tensors than the previous version"
            )
        buffer = self._open_buffer(version, layout)
        try:
            control.send(deadline=deadline, accepts=True, buffer=channel.prepare_receive(buffer))
            digest = self._receive_buckets(
                channel,
                buffer.data,
                layout,
                buckets=layout.buckets(max_bytes=reply.bucket_bytes),
                deadline=deadline,
            )
            with self._condition:
                self._received, self._incoming_version = (
                    ReceivedVersion(version, layout, buffer, digest, reply.transport),
                    -1,
                )
        except ConnectionLost:
            self._metrics.count_broadcast_failure("lost")
            raise
        finally:
            self._incoming_version = -1
        self._metrics.count_broadcast_bytes(layout.num_bytes, transport=reply.transport)
        self._wake()
        control.send(deadline=deadline, digest=digest.hex())

    def _receive_buckets(
        self,
        channel: Channel,
        buffer: Tensor,
        layout: Layout,
        *,
        buckets: Sequence[range],
        deadline: Deadline,
    ) -> bytes:
        """Receive a version's buckets; return the digest of its tensors, computed for one bucket
        while the next ones arrive.

        Raises:
            ConnectionLost: They did not arrive before the deadline.
        """
        digest, ahead, pending = BufferDigest(layout, buffer), iter(buckets), deque[Transfer]()
        for bucket in buckets:
            for coming in islice(ahead, MAX_PENDING_BUCKETS - len(pending)):
                pending.append(
                    channel.receive(
                        buffer[coming.start : coming.stop],
                        deadline.within(self._config.stall_seconds),
                    )
                )
            pending.popleft().wait()
            failpoint("weights.receiving")
            digest.update(bucket)
        return digest.value()

    def _open_buffer(self, policy_version: int, layout: Layout) -> ReceiveBuffer:
        """Return a buffer to receive into; drop an earlier version that was not taken."""
        with self._condition:
            self._incoming_version = policy_version
            if self._received is not None:
                self._free_buffers.append(self._received.buffer)
                self._received = None
            fitting = [
                buffer for buffer in self._free_buffers if len(buffer.data) == layout.num_bytes
            ]
            self._free_buffers = fitting[1:]
        return fitting[0] if fitting else ReceiveBuffer(layout.num_bytes)


@dataclass(frozen=True, slots=True)
class JoinReply:
    """The trainer's reply to a request to join."""

    transport: str
    rendezvous_port: int
    group: str
    bucket_bytes: int

    @classmethod
    def parse(cls, message: Mapping[str, Any]) -> JoinReply:
        """Parse the reply.

        Raises:
            ConnectionLost: It is incomplete or invalid.
        """
        try:
            reply = cls(
                str(message["transport"]),
                int(message["rendezvous_port"]),
                str(message["group"]),
                int(message["bucket_bytes"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ConnectionLost(
                f"the trainer's reply can't be read: {dict(message)}: {error}"
            ) from error
        return reply
