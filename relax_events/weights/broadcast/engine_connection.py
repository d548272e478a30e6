"""The trainer's connection to one engine, served by a thread of its own."""

from __future__ import annotations

import hmac
import queue
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

import structlog
import torch
from torch import Tensor

from relax_events.config import WeightsConfig
from relax_events.deadline import Deadline
from relax_events.runtime.failpoints import failpoint
from relax_events.telemetry.component_metrics import WeightMetrics
from relax_events.weights.broadcast.buckets import Layout
from relax_events.weights.broadcast.channel import (
    MAX_PENDING_BUCKETS,
    Channel,
    ConnectionLost,
    Transfer,
)
from relax_events.weights.broadcast.control_socket import ControlSocket
from relax_events.weights.broadcast.process_groups import Backend, Rendezvous, open_channel
from relax_events.weights.broadcast.shared_memory import SharedMemoryChannel, is_on_same_host

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class WeightsSnapshot:
    """A version that is offered to engines. Its tensors must not change."""

    policy_version: int
    tensors: Mapping[str, Tensor]
    layout: Layout
    digest: Future[bytes] = field(default_factory=Future)
    """`weights_digest` of the weights, set once the store has them."""


class ConnectionOwner(Protocol):
    """The attributes of the `Broadcaster` that a connection uses."""

    config: WeightsConfig
    backend: Backend
    metrics: WeightMetrics
    join_token: str
    rendezvous_port: int

    def add_member(self, connection: EngineConnection) -> None:
        """Add a connection whose engine has joined."""
        ...

    def remove(self, connection: EngineConnection) -> None:
        """Remove a connection that has ended."""
        ...


class EngineConnection:
    """See the module's docstring."""

    def __init__(self, owner: ConnectionOwner, control: ControlSocket, *, group: str) -> None:
        self.worker_id = self.transport = ""
        self.sending: WeightsSnapshot | None = None
        self._owner, self._control, self._group = owner, control, group
        self._channel: Channel | None = None
        self._offers: queue.SimpleQueue[WeightsSnapshot] = queue.SimpleQueue()
        self._wake_writer, self._wake_reader = socket.socketpair()
        self.thread = threading.Thread(target=self._run, name=f"broadcast-{group}", daemon=True)

    def offer(self, snapshot: WeightsSnapshot) -> None:
        """Send a version next; it replaces a version that still waits."""
        self._offers.put(snapshot)
        with suppress(OSError):  # the connection has just ended
            self._wake_writer.send(b"1")

    def shut_down(self) -> None:
        """End the connection, from any thread."""
        self._control.shut_down()
        if (channel := self._channel) is not None:
            channel.abort()

    def _run(self) -> None:
        try:
            with self._control, self._wake_writer, self._wake_reader:
                self._handshake()
                while True:
                    self._wait_for_offer()
                    while not self._offers.empty():
                        self.sending = self._offers.get()
                    if self.sending is not None:
                        self._send(self.sending)
                    self.sending = None
        except ConnectionLost as error:
            if self.sending is not None:
                self._owner.metrics.count_broadcast_failure(error.reason)
            version = self.sending.policy_version if self.sending else None
            log.warning(
                "broadcast.lost", worker=self.worker_id, policy_version=version, error=str(error)
            )
        finally:
            self.sending = None
            channel, self._channel = self._channel, None  # dropping it frees its port
            if channel is not None:
                channel.abort()
            self._owner.remove(self)

    def _handshake(self) -> None:
        owner = self._owner
        deadline = Deadline(owner.config.deadline_seconds)
        request = self._control.receive(deadline)
        if not hmac.compare_digest(
            str(request.get("join_token")).encode(), owner.join_token.encode()
        ):
            raise ConnectionLost("an engine connected without the join token from the control log")
        self.worker_id = str(request.get("worker_id"))
        use_shared_memory = owner.config.use_shared_memory and is_on_same_host(
            request.get("memory")
        )
        self.transport = "memory" if use_shared_memory else owner.backend
        self._control.send(
            deadline=deadline,
            transport=self.transport,
            rendezvous_port=owner.rendezvous_port,
            group=self._group,
            bucket_bytes=owner.config.bucket_bytes,
        )
        if use_shared_memory:
            self._channel = SharedMemoryChannel(self._control)
        else:
            rendezvous = Rendezvous(owner.config.host, owner.rendezvous_port, self._group)
            self._channel = open_channel(
                owner.backend, rendezvous, rank=0, host=owner.config.host, deadline=deadline
            )
        owner.add_member(self)

    def _wait_for_offer(self) -> None:
        """Wait for a version to send.

        Raises:
            ConnectionLost: The engine has disconnected.
        """
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            selector.register(self._wake_reader, selectors.EVENT_READ)
            ready = [key.fileobj for key, _ in selector.select()]
        if self._control in ready:
            raise ConnectionLost(f"unexpected message: {self._control.receive(Deadline(1.0))}")
        self._wake_reader.recv(1024)

    def _send(self, snapshot: WeightsSnapshot) -> None:
        """Send a version and compare the engine's digest of it.

        Raises:
            ConnectionLost: It did not arrive intact before the deadline.
        """
        owner, started = self._owner, time.monotonic()
        deadline = Deadline(owner.config.deadline_seconds)
        self._control.send(
            deadline=deadline, policy_version=snapshot.policy_version, layout=snapshot.layout.digest
        )
        reply = self._control.receive(deadline)
        if not reply.get("accepts"):
            log.info(
                "weights.rejected",
                worker=self.worker_id,
                policy_version=snapshot.policy_version,
                reason=reply.get("reason"),
            )
            return
        assert self._channel is not None
        self._channel.begin_send(reply.get("buffer"), num_bytes=snapshot.layout.num_bytes)
        send_buckets(self._channel, snapshot, owner.config, deadline)
        arrived = self._control.receive(deadline).get("digest")
        try:
            digest = snapshot.digest.result(deadline.remaining_seconds)
        except (CancelledError, TimeoutError) as error:
            raise ConnectionLost("the version could not be written to the store") from error
        if arrived != digest.hex():
            text = (
                f"policy version {snapshot.policy_version} arrived with digest {arrived}, it "
                f"was sent with {digest.hex()}"
            )
            raise ConnectionLost(text, reason="torn")
        owner.metrics.count_broadcast_bytes(snapshot.layout.num_bytes, transport=self.transport)
        log.info(
            "weights.sent",
            worker=self.worker_id,
            policy_version=snapshot.policy_version,
            seconds=round(time.monotonic() - started, 3),
        )


def send_buckets(
    channel: Channel, snapshot: WeightsSnapshot, config: WeightsConfig, deadline: Deadline
) -> None:
    """Send a version's buckets; the next one is gathered while earlier ones are sent.

    Raises:
        ConnectionLost: The engine did not receive them before the deadline.
    """
    bucket_bytes = config.bucket_bytes
    staging = [
        torch.zeros(min(bucket_bytes, snapshot.layout.num_bytes), dtype=torch.uint8)
        for _ in range(MAX_PENDING_BUCKETS)
    ]
    pending: deque[Transfer] = deque()
    for number, bucket in enumerate(snapshot.layout.buckets(max_bytes=bucket_bytes)):
        if len(pending) == MAX_PENDING_BUCKETS:
            pending.popleft().wait()
        data = snapshot.layout.gather(
            bucket, snapshot.tensors, staging=staging[number % MAX_PENDING_BUCKETS]
        )
        pending.append(channel.send(data, deadline.within(config.stall_seconds)))
        failpoint("weights.broadcasting")
    for transfer in pending:
        transfer.wait()
