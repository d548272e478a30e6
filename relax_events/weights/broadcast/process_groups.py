"""Channels over process groups of two: the trainer is rank 0, one engine's worker rank 1.

The groups are not part of torch's global state, so they coexist with the trainer's own group.
Nothing is pickled.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not in its list of names
from torch.distributed.distributed_c10d import PrefixStore, Store

from relax_events.deadline import Deadline
from relax_events.errors import EnvironmentProblem
from relax_events.weights.broadcast.channel import Channel, ConnectionLost, ReceiveBuffer, Transfer

Backend = Literal["gloo", "nccl"]
NO_TIMEOUT = timedelta(days=365)
POLL_SECONDS = 0.0005


def require_backend(transport: str) -> Backend:
    """Return the backend of a transport.

    Raises:
        EnvironmentProblem: This machine lacks a requirement, or the transport sends nothing; the
            text names the remedy.
    """
    if transport == "gloo" and dist.is_gloo_available():
        return "gloo"
    if transport == "nccl" and dist.is_nccl_available() and torch.cuda.is_available():
        return "nccl"
    requirement = {"gloo": "a torch with gloo", "nccl": "a torch with NCCL, and a GPU"}.get(
        transport, "to be 'gloo' or 'nccl'"
    )
    raise EnvironmentProblem(
        f"weights.transport = {transport!r} needs {requirement}, to send weights from here; set "
        "weights.transport = 'store'"
    )


def serve_rendezvous(listener: socket.socket, *, timeout_seconds: float) -> Store:
    """Serve the rendezvous store of all groups on a listening socket; dropping the store closes
    it.
    """
    host, port = listener.getsockname()[:2]
    timeout = timedelta(seconds=timeout_seconds)
    store: Store = TCPStore(
        host,
        port,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return store


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Address of the trainer's rendezvous store, and the group's unique prefix in it."""

    host: str
    port: int
    group: str

    def connect(self, deadline: Deadline) -> Store:
        """Connect to the store."""
        return PrefixStore(
            self.group,
            TCPStore(
                self.host,
                self.port,
                is_master=False,
                timeout=remaining_time(deadline),
                wait_for_workers=False,
            ),
        )


def open_channel(
    backend: Backend, rendezvous: Rendezvous, *, rank: int, host: str, deadline: Deadline
) -> Channel:
    """Form the group; both sides call this at about the same time.

    Args:
        backend: Moves the bytes.
        rendezvous: The same on both sides.
        rank: 0 sends.
        host: Address of this machine that the peer can reach.
        deadline: For the peer to join.
    Raises:
        ConnectionLost: The peer did not join before the deadline.
    """
    try:
        store = rendezvous.connect(deadline)
        return (
            GlooChannel(store, rank=rank, host=host, deadline=deadline)
            if backend == "gloo"
            else NcclChannel(store, rank=rank)
        )
    except RuntimeError as error:
        raise ConnectionLost(f"the group could not be formed: {error}") from error


class ProcessGroupChannel:
    """A process group; the sender needs no description of the receive buffer."""

    def prepare_receive(self, buffer: ReceiveBuffer) -> Mapping[str, Any]:
        """See `Channel.prepare_receive`."""
        return {}

    def begin_send(self, buffer: object, *, num_bytes: int) -> None:
        """See `Channel.begin_send`."""


class GlooChannel(ProcessGroupChannel):
    """Sends host memory over TCP."""

    def __init__(
        self, store: Store, *, rank: int, host: str, deadline: Deadline, num_ranks: int = 2
    ) -> None:
        """See `open_channel`; a group may have more ranks, all of which receive."""
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # noqa: SLF001  # the only way to name the address to listen on
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]  # noqa: SLF001
        options._timeout, options._threads = remaining_time(deadline), 1  # noqa: SLF001
        self._group = dist.ProcessGroupGloo(store, rank, num_ranks, options)

    def send(self, data: Tensor, deadline: Deadline) -> Transfer:
        """See `Channel.send`."""
        return GlooTransfer(self._group, data, deadline)

    def receive(self, data: Tensor, deadline: Deadline) -> Transfer:
        """See `Channel.receive`."""
        return GlooTransfer(self._group, data, deadline)

    def abort(self) -> None:
        """See `Channel.abort`."""
        self._group.abort()


class GlooTransfer:
    """See `Transfer`."""

    def __init__(self, group: dist.ProcessGroupGloo, data: Tensor, deadline: Deadline) -> None:
        self._deadline = deadline
        # with its own timeout: a broadcast without one blocks the group's thread even after
        # its waiter has given up
        try:
            self._work = group.broadcast(data, 0, remaining_time(deadline))  # type: ignore[attr-defined]  # its stubs declare it on the wrapper only
        except RuntimeError as error:
            raise ConnectionLost(str(error)) from error

    def wait(self) -> None:
        """See `Transfer.wait`."""
        try:
            self._work.wait(remaining_time(self._deadline))
        except RuntimeError as error:
            raise ConnectionLost(
                "the deadline has passed" if self._deadline.passed else str(error)
            ) from error


class NcclChannel(ProcessGroupChannel):
    """Sends GPU memory, a bucket at a time; the buffers are in host memory on both sides."""

    def __init__(self, store: Store, *, rank: int) -> None:
        """See `open_channel`; NCCL connects with the first bucket."""
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = NO_TIMEOUT  # noqa: SLF001  # torch would end the process at its own deadline; our deadline closes the group
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._group = dist.ProcessGroupNCCL(store, rank, 2, options)

    def send(self, data: Tensor, deadline: Deadline) -> Transfer:
        """See `Channel.send`."""
        return NcclTransfer(self._group, data.to(self._device), None, deadline)

    def receive(self, data: Tensor, deadline: Deadline) -> Transfer:
        """See `Channel.receive`."""
        return NcclTransfer(
            self._group, torch.empty_like(data, device=self._device), data, deadline
        )

    def abort(self) -> None:
        """See `Channel.abort`."""
        self._group.abort()


class NcclTransfer:
    """See `Transfer`."""

    def __init__(
        self,
        group: dist.ProcessGroupNCCL,
        staged: Tensor,
        target: Tensor | None,
        deadline: Deadline,
    ) -> None:
        self._group, self._staged, self._target, self._deadline = group, staged, target, deadline
        try:
            group.broadcast(staged, 0, NO_TIMEOUT).wait()  # type: ignore[attr-defined]  # likewise; the stream waits, not this thread
        except RuntimeError as error:
            raise ConnectionLost(str(error)) from error
        self._done = torch.cuda.Event()
        self._done.record()

    def wait(self) -> None:
        """See `Transfer.wait`."""
        try:
            while not self._done.query():
                if self._deadline.passed:
                    self._group.abort()
                    raise ConnectionLost("the deadline has passed")
                time.sleep(POLL_SECONDS)
            if self._target is not None:
                self._target.copy_(self._staged)
        except RuntimeError as error:
            raise ConnectionLost(str(error)) from error


def remaining_time(deadline: Deadline) -> timedelta:
    """Return the remaining time for torch: never 0, which would mean no timeout."""
    return timedelta(seconds=max(0.001, deadline.remaining_seconds))
