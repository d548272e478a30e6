"""The data channel between the trainer and one engine's worker: a process group of two
(`process_groups`) or shared memory (`shared_memory`).

Each engine has its own channel, so a slow engine delays no other. Weights are received into memory
buffers that another process of the same host can map.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from jaxtyping import UInt8
from torch import Tensor

from relax_events.deadline import Deadline
from relax_events.errors import WeightsError
from relax_events.weights.broadcast.descriptors import NAME, SERVER, SharedFile

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""Of a buffer's size: a mapping of a file that becomes shorter would end the process that uses it.
"""


class ReceiveBuffer:
    """A zero-filled buffer to receive into.

    Attributes:
        data: Its bytes.
        file: Its memory file.
    """

    def __init__(self, num_bytes: int) -> None:
        """Allocate memory; its size is sealed, so that no mapping of it can become invalid."""
        file = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.file = SharedFile(file)
        os.ftruncate(file, max(1, num_bytes))
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, SEALS)
        self.data: UInt8[Tensor, " bytes"] = map_buffer(file, num_bytes)

    @property
    def handle(self) -> dict[str, Any]:
        """The address by which another process of this user maps it. It holds a key: send it only
        over an authenticated connection, and log it nowhere.
        """
        return {
            "socket": SERVER.share(self.file),
            "key": self.file.key.hex(),
            "number": os.fstat(self.file.descriptor).st_ino,
        }


def map_buffer(file: int, num_bytes: int) -> UInt8[Tensor, " bytes"]:
    """Map a memory file and populate all of its pages at once."""
    memory = mmap.mmap(file, max(1, num_bytes), flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    return torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes]


MAX_PENDING_BUCKETS = 3
"""Transfers that either side starts before it waits for the oldest, so that neither waits between
two buckets."""


class ConnectionLost(WeightsError):
    """The peer of a broadcast disconnected, sent something invalid, or missed a deadline."""

    def __init__(self, text: str, *, reason: str = "lost") -> None:
        """Create the error with its text and the `reason` label of the failure metric."""
        super().__init__(text)
        self.reason = reason


class Transfer(Protocol):
    """A bucket that is being sent or received."""

    def wait(self) -> None:
        """Wait until the sent bytes may be overwritten, or the received ones have arrived.

        Raises:
            ConnectionLost: The deadline has passed, or the peer disconnected.
        """
        ...


class Channel(Protocol):
    """A channel between rank 0, which sends, and rank 1. Unusable after a `ConnectionLost`."""

    def prepare_receive(self, buffer: ReceiveBuffer) -> Mapping[str, Any]:
        """Prepare to receive a version into a buffer, as rank 1; return the description of the
        buffer for the sender.
        """
        ...

    def begin_send(self, buffer: object, *, num_bytes: int) -> None:
        """Prepare to send a version, as rank 0, to the peer's prepared buffer.

        Raises:
            ConnectionLost: The peer's description of its buffer is invalid.
        """
        ...

    def send(self, data: Tensor, deadline: Deadline) -> Transfer:
        """Start sending bytes, as rank 0; they must not change until the transfer has finished."""
        ...

    def receive(self, data: Tensor, deadline: Deadline) -> Transfer:
        """Start receiving bytes into `data`, as rank 1."""
        ...

    def abort(self) -> None:
        """Close the channel, from any thread. Pending transfers fail, with gloo no later than their
        deadline.
        """
        ...
