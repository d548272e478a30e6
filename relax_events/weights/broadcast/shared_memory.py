"""A channel over memory that the trainer and a worker on the same host share: written bytes need
not be sent.

A buffer is an anonymous memory file of the worker. The trainer opens it through /proc, which
requires the same user, and the same container if there is one. Nothing remains of it after either
process ends. A buffer of a lost connection is not received into again, since a trainer that resumes
late may still write to it.
"""

from __future__ import annotations

import fcntl
import hmac
import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import UInt8
from torch import Tensor

from relax_events.deadline import Deadline
from relax_events.weights.broadcast.channel import (
    NAME,
    SEALS,
    ConnectionLost,
    ReceiveBuffer,
    Transfer,
    map_buffer,
)
from relax_events.weights.broadcast.control_socket import ControlSocket

KEY_BYTES = 16
NUM_BUFFERS = 2
"""Buffers that a worker receives into in turn."""


class SameHostProbe(ReceiveBuffer):
    """A buffer with a random key, by which the trainer detects that it runs on the same host."""

    def __init__(self) -> None:
        """Fill the buffer with a random key."""
        super().__init__(KEY_BYTES)
        key = secrets.token_bytes(KEY_BYTES)
        self.data.copy_(torch.frombuffer(bytearray(key), dtype=torch.uint8))
        self.handle |= {"key": key.hex()}


def is_on_same_host(handle: object) -> bool:
    """Return whether the memory of a worker's `SameHostProbe` can be mapped by this process."""
    try:
        found = bytes(map_remote_buffer(handle, KEY_BYTES).numpy())
    except ConnectionLost:
        return False
    return isinstance(handle, Mapping) and hmac.compare_digest(
        found.hex().encode(), str(handle.get("key")).encode()
    )


def map_remote_buffer(handle: object, num_bytes: int) -> UInt8[Tensor, " bytes"]:
    """Map a buffer of another process for writing.

    Args:
        handle: The peer's `ReceiveBuffer.handle`.
        num_bytes: Size of the buffer.
    Raises:
        ConnectionLost: There is no such buffer of this size.
    """
    if not isinstance(handle, Mapping):
        raise ConnectionLost(f"invalid buffer handle {handle!r}")
    path = Path("/proc", str(handle.get("process")), "fd", str(handle.get("file")))
    try:
        if not path.readlink().name.startswith(f"memfd:{NAME} "):
            raise ConnectionLost(f"{path} is no receive buffer for weights")
        with path.open("r+b", buffering=0) as file:
            state = os.fstat(file.fileno())
            if (state.st_ino, state.st_size) != (handle.get("number"), max(1, num_bytes)):
                raise ConnectionLost(f"{path} is not the buffer of the handle")
            if fcntl.fcntl(file, fcntl.F_GET_SEALS) & SEALS != SEALS:
                raise ConnectionLost(f"{path} has a size that its worker may change")
            return map_buffer(file.fileno(), num_bytes)
    except (OSError, ValueError) as error:
        raise ConnectionLost(f"{path} can't be mapped: {error}") from error


class SharedMemoryChannel:
    """See `Channel`. The control socket carries how many bytes are written, and how many the peer
    has read.
    """

    def __init__(self, control: ControlSocket) -> None:
        """Use an established control socket."""
        self._control = control
        self._buffers: dict[str, Tensor] = {}
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._offset = self._peer_offset = 0

    def prepare_receive(self, buffer: ReceiveBuffer) -> Mapping[str, Any]:
        """See `Channel.prepare_receive`."""
        self._offset = self._peer_offset = 0
        return buffer.handle

    def begin_send(self, buffer: object, *, num_bytes: int) -> None:
        """See `Channel.begin_send`."""
        self._offset = self._peer_offset = 0
        key = json.dumps(buffer)
        self._buffer = (
            self._buffers.pop(key) if key in self._buffers else map_remote_buffer(buffer, num_bytes)
        )
        self._buffers = dict([*self._buffers.items(), (key, self._buffer)][-NUM_BUFFERS:])

    def send(self, data: Tensor, deadline: Deadline) -> Transfer:
        """See `Channel.send`."""
        self._buffer[self._offset : self._offset + len(data)].copy_(data)
        self._offset += len(data)
        self._control.send(deadline=deadline, written=self._offset)
        return PendingWrite(self, self._offset, deadline)

    def receive(self, data: Tensor, deadline: Deadline) -> Transfer:
        """See `Channel.receive`."""
        self._offset += len(data)
        return PendingRead(self, self._offset, deadline)

    def wait_for_progress(self, key: str, end: int, deadline: Deadline) -> None:
        """Wait until the peer reports this offset.

        Raises:
            ConnectionLost: It did not before the deadline.
        """
        while self._peer_offset < end:
            message = self._control.receive(deadline)
            if not isinstance(message.get(key), int):
                raise ConnectionLost(f"unexpected message: {message}")
            self._peer_offset = message[key]

    def acknowledge(self, end: int, deadline: Deadline) -> None:
        """Report the offset up to which this side has read."""
        self._control.send(deadline=deadline, read=end)

    def abort(self) -> None:
        """See `Channel.abort`."""
        self._control.shut_down()


@dataclass(frozen=True, slots=True)
class PendingWrite:
    """A bucket that the peer has not read yet. See `Transfer`."""

    channel: SharedMemoryChannel
    end: int
    deadline: Deadline

    def wait(self) -> None:
        """See `Transfer.wait`."""
        self.channel.wait_for_progress("read", self.end, self.deadline)


@dataclass(frozen=True, slots=True)
class PendingRead:
    """A bucket that the peer may not have written yet. See `Transfer`."""

    channel: SharedMemoryChannel
    end: int
    deadline: Deadline

    def wait(self) -> None:
        """See `Transfer.wait`."""
        self.channel.wait_for_progress("written", self.end, self.deadline)
        self.channel.acknowledge(self.end, self.deadline)
