"""The trainer's end of a link to one engine, with the thread that tends it."""

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
    """A version on offer. Nobody changes its tensors."""

    policy_version: int
    tensors: Mapping[str, Tensor]
    layout: Layout
    digest: Future[bytes] = field(default_factory=Future)
    """Of the weights in transit, known once the store has them."""


class ConnectionOwner(Protocol):
    """Whoever has the links."""

    config: WeightsConfig
    backend: Backend
    metrics: WeightMetrics
    join_token: str
    rendezvous_port: int

    def add_member(self, link: EngineConnection) -> None:
        """Note that its engine has joined."""
        ...

    def remove(self, link: EngineConnection) -> None:
        """Note that it has ended."""
        ...


class EngineConnection:
    """See the module's docstring."""

    def __init__(self, owner: ConnectionOwner, line: ControlSocket, *, group: str) -> None:
        self.worker_id = self.transport = ""
        self.sending: WeightsSnapshot | None = None
        self._owner, self._line, self._group = owner, line, group
        self._pair: Channel | None = None
        self._offers: queue.SimpleQueue[WeightsSnapshot] = queue.SimpleQueue()
        self._bell, self._ear = socket.socketpair()
        self.thread = threading.Thread(target=self._run, name=f"broadcast-{group}", daemon=True)

    def offer(self, snapshot: WeightsSnapshot) -> None:
        """Have a version sent next; one that waited already is passed over for it."""
        self._offers.put(snapshot)
        with suppress(OSError):  # it has just ended
            self._bell.send(b"1")

    def shut_down(self) -> None:
        """End it, from any thread."""
        self._line.shut_down()
        if (pair := self._pair) is not None:
            pair.abort()

    def _run(self) -> None:
        try:
            with self._line, self._bell, self._ear:
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
                self._owner.metrics.failed(error.reason)
            version = self.sending.policy_version if self.sending else None
            log.warning(
                "broadcast.lost", worker=self.worker_id, policy_version=version, error=str(error)
            )
        finally:
            self.sending = None
            pair, self._pair = self._pair, None  # whose port is free as soon as nobody holds it
            if pair is not None:
                pair.abort()
            self._owner.remove(self)

    def _handshake(self) -> None:
        owner = self._owner
        deadline = Deadline(owner.config.deadline_seconds)
        asked = self._line.receive(deadline)
        if not hmac.compare_digest(str(asked.get("ticket")).encode(), owner.join_token.encode()):
            raise ConnectionLost("someone came without the ticket that stands on the control log")
        self.worker_id = str(asked.get("worker_id"))
        use_shared_memory = owner.config.use_shared_memory and is_on_same_host(asked.get("memory"))
        self.transport = "memory" if use_shared_memory else owner.backend
        self._line.send(
            deadline=deadline,
            way=self.transport,
            meeting_port=owner.rendezvous_port,
            group=self._group,
            bucket_bytes=owner.config.bucket_bytes,
        )
        if use_shared_memory:
            self._pair = SharedMemoryChannel(self._line)
        else:
            meeting = Rendezvous(owner.config.host, owner.rendezvous_port, self._group)
            self._pair = open_channel(
                owner.backend, meeting, rank=0, host=owner.config.host, deadline=deadline
            )
        owner.add_member(self)

    def _wait_for_offer(self) -> None:
        """Wait for a version, or for the engine to leave.

        Raises:
            LinkLost: It has left.
        """
        with selectors.DefaultSelector() as selector:
            selector.register(self._line, selectors.EVENT_READ)
            selector.register(self._ear, selectors.EVENT_READ)
            ready = [key.fileobj for key, _ in selector.select()]
        if self._line in ready:
            raise ConnectionLost(f"it speaks out of turn: {self._line.receive(Deadline(1.0))}")
        self._ear.recv(1024)

    def _send(self, snapshot: WeightsSnapshot) -> None:
        """Send a version, and see that it has arrived as it is.

        Raises:
            LinkLost: It has not, in time.
        """
        owner, started = self._owner, time.monotonic()
        deadline = Deadline(owner.config.deadline_seconds)
        self._line.send(
            deadline=deadline, policy_version=snapshot.policy_version, layout=snapshot.layout.digest
        )
        answer = self._line.receive(deadline)
        if not answer.get("takes"):
            log.info(
                "weights.declined",
                worker=self.worker_id,
                policy_version=snapshot.policy_version,
                reason=answer.get("reason"),
            )
            return
        assert self._pair is not None
        self._pair.begin_send(answer.get("row"), num_bytes=snapshot.layout.num_bytes)
        send_buckets(self._pair, snapshot, owner.config, deadline)
        arrived = self._line.receive(deadline).get("digest")
        try:
            digest = snapshot.digest.result(deadline.remaining_seconds)
        except (CancelledError, TimeoutError) as error:
            raise ConnectionLost("the store did not get the version") from error
        if arrived != digest.hex():
            text = (
                f"policy version {snapshot.policy_version} arrived with digest {arrived}, it "
                f"left with {digest.hex()}"
            )
            raise ConnectionLost(text, reason="torn")
        owner.metrics.moved(snapshot.layout.num_bytes, transport=self.transport)
        log.info(
            "weights.sent",
            worker=self.worker_id,
            policy_version=snapshot.policy_version,
            seconds=round(time.monotonic() - started, 3),
        )


def send_buckets(pair: Channel, snapshot: WeightsSnapshot, config: WeightsConfig, deadline: Deadline) -> None:
    """Send a version's buckets: while some are under way the next one is gathered.

    Raises:
        LinkLost: The other side does not take them in time.
    """
    bucket_bytes = config.bucket_bytes
    staging = [
        torch.zeros(min(bucket_bytes, snapshot.layout.num_bytes), dtype=torch.uint8)
        for _ in range(MAX_PENDING_BUCKETS)
    ]
    under_way: deque[Transfer] = deque()
    for number, bucket in enumerate(snapshot.layout.buckets(max_bytes=bucket_bytes)):
        if len(under_way) == MAX_PENDING_BUCKETS:
            under_way.popleft().wait()
        data = snapshot.layout.gather(
            bucket, snapshot.tensors, staging=staging[number % MAX_PENDING_BUCKETS]
        )
        under_way.append(pair.send(data, deadline.within(config.stall_seconds)))
        failpoint("weights.broadcasting")
    for transfer in under_way:
        transfer.wait()
