"""Process groups of two: the trainer, rank 0, and one engine's worker.

The groups are no part of torch's global state: the trainer's ranks have theirs beside them. Nothing
is pickled.
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
from relax_events.weights.broadcast.channel import ConnectionLost, Channel, Transfer
from relax_events.weights.broadcast.receive_buffers import ReceiveBuffer

Backend = Literal["gloo", "nccl"]
NO_TIMEOUT = timedelta(days=365)
POLL_SECONDS = 0.0005


def require_backend(transport: str) -> Backend:
    """Give the backend of a transport, if this machine has what it needs.

    Raises:
        EnvironmentProblem: It has not, or the transport sends nothing; the text says what to do.
    """
    if transport == "gloo" and dist.is_gloo_available():
        return "gloo"
    if transport == "nccl" and dist.is_nccl_available() and torch.cuda.is_available():
        return "nccl"
    need = {"gloo": "a torch with gloo", "nccl": "a torch with NCCL, and a GPU"}.get(
        transport, "to be 'gloo' or 'nccl'"
    )
    raise EnvironmentProblem(
        f"weights.transport = {transport!r} needs {need}, to send weights from here; set "
        "weights.transport = 'store'"
    )


def serve_rendezvous(listener: socket.socket, *, timeout_seconds: float) -> Store:
    """Open the store by which the two sides of each group find each other, behind a socket that
    listens; it is there while it is held.
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
    """Where the two sides of a group meet: the trainer's store, and a name in it that no other
    group has.
    """

    host: str
    port: int
    group: str

    def connect(self, deadline: Deadline) -> Store:
        """Connect to it."""
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
    backend: Backend, meeting: Rendezvous, *, rank: int, host: str, deadline: Deadline
) -> Channel:
    """Form the group; both sides call it at about the same time.

    Args:
        backend: What moves the bytes.
        meeting: The same on both sides.
        rank: 0 sends.
        host: Address of this machine that the other side reaches.
        deadline: Until when the other side must have come.
    Raises:
        LinkLost: It did not.
    """
    try:
        store = meeting.connect(deadline)
        return (
            GlooChannel(store, rank=rank, host=host, deadline=deadline)
            if backend == "gloo"
            else NcclChannel(store, rank=rank)
        )
    except RuntimeError as error:
        raise ConnectionLost(f"the group could not be formed: {error}") from error


class ProcessGroupChannel:
    """A process group, which needs to know nothing of a row."""

    def invite(self, row: ReceiveBuffer) -> Mapping[str, Any]:
        """See `Pair.invite`."""
        return {}

    def begin(self, invitation: object, *, num_bytes: int) -> None:
        """See `Pair.begin`."""


class GlooChannel(ProcessGroupChannel):
    """Between processes' memories, over TCP."""

    def __init__(self, store: Store, *, rank: int, host: str, deadline: Deadline) -> None:
        """See `form_pair`."""
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # noqa: SLF001  # the only way to name the address to listen on
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]  # noqa: SLF001
        options._timeout, options._threads = remaining_time(deadline), 1  # noqa: SLF001
        self._group = dist.ProcessGroupGloo(store, rank, 2, options)

    def send(self, data: Tensor, deadline: Deadline) -> Transfer:
        """See `Pair.send`."""
        return GlooTransfer(self._group, data, deadline)

    def receive(self, data: Tensor, deadline: Deadline) -> Transfer:
        """See `Pair.receive`."""
        return GlooTransfer(self._group, data, deadline)

    def abort(self) -> None:
        """See `Pair.abort`."""
        self._group.abort()


class GlooTransfer:
    """See `Transfer`."""

    def __init__(self, group: dist.ProcessGroupGloo, data: Tensor, deadline: Deadline) -> None:
        self._deadline = deadline
        # with a timeout of its own: what waits for ever holds the group's thread, also when nobody
        # waits for it any more
        try:
            self._work = group.broadcast(data, 0, remaining_time(deadline))  # type: ignore[attr-defined]  # which its stubs give to the wrapper alone
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
    """Between GPUs, a bucket at a time: the rows of bytes lie in the host's memory on both
    sides.
    """

    def __init__(self, store: Store, *, rank: int) -> None:
        """See `form_pair`; NCCL connects with the first bucket."""
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = NO_TIMEOUT  # noqa: SLF001  # torch would end the process at its own deadline; ours ends the group
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._group = dist.ProcessGroupNCCL(store, rank, 2, options)

    def send(self, data: Tensor, deadline: Deadline) -> Transfer:
        """See `Pair.send`."""
        return NcclTransfer(self._group, data.to(self._device), None, deadline)

    def receive(self, data: Tensor, deadline: Deadline) -> Transfer:
        """See `Pair.receive`."""
        return NcclTransfer(
            self._group, torch.empty_like(data, device=self._device), data, deadline
        )

    def abort(self) -> None:
        """See `Pair.abort`."""
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
            group.broadcast(staged, 0, NO_TIMEOUT).wait()  # type: ignore[attr-defined]  # likewise; this makes the stream wait, not us
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
    """Give what is left of a deadline, as torch wants it: never nothing, which means for ever."""
    return timedelta(seconds=max(0.001, deadline.remaining_seconds))
