"""A channel over memory that the trainer and a worker on the same host share: written bytes need
not be sent.

A buffer is an anonymous memory file of the worker. The worker sends its descriptor to the trainer,
which must have the same user and network namespace, and present the buffer's key. Nothing remains
of it after either process ends. A buffer of a lost connection is not received into again, since a
trainer that resumes late may still write to it.
"""

from __future__ import annotations

import fcntl
import hmac
import json
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import UInt8
from torch import Tensor

from relax_events.deadline import Deadline
from relax_events.weights.broadcast.channel import (
    SEALS,
    ConnectionLost,
    ReceiveBuffer,
    Transfer,
    map_buffer,
)
from relax_events.weights.broadcast.control_socket import ControlSocket
from relax_events.weights.broadcast.descriptors import KEY_BYTES, NAME, request_descriptor

PROBE_BYTES = 16
SOCKET_NAME = re.compile(f"{NAME}-[0-9a-f]{{{2 * KEY_BYTES}}}")
KEY = re.compile(f"[0-9a-f]{{{2 * KEY_BYTES}}}")
NUM_BUFFERS = 2
"""Buffers that a worker receives into in turn."""


class SameHostProbe(ReceiveBuffer):
    """A buffer of random bytes, by which the trainer detects that it runs on the same host."""

    def __init__(self) -> None:
        """Fill the buffer with random bytes."""
        super().__init__(PROBE_BYTES)
        self._content = secrets.token_bytes(PROBE_BYTES)
        self.data.copy_(torch.frombuffer(bytearray(self._content), dtype=torch.uint8))

    @property
    def handle(self) -> dict[str, Any]:
        """See `ReceiveBuffer.handle`."""
        return super().handle | {"content": self._content.hex()}


def is_on_same_host(handle: object) -> bool:
    """Return whether the memory of a worker's `SameHostProbe` can be mapped by this process."""
    try:
        content = bytes(map_remote_buffer(handle, PROBE_BYTES).numpy())
    except ConnectionLost:
        return False
    return isinstance(handle, Mapping) and hmac.compare_digest(
        content.hex().encode(), str(handle.get("content")).encode()
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
        raise ConnectionLost("the peer's handle of its buffer is no JSON object")
    name, key = (
        _check_field(handle, field, pattern)
        for field, pattern in {"socket": SOCKET_NAME, "key": KEY}.items()
    )
    try:
        file = request_descriptor(name, bytes.fromhex(key))
    except OSError as error:
        raise ConnectionLost(f"no buffer came over the socket {name}: {error}") from error
    try:
        _check_file(file, number=handle.get("number"), num_bytes=max(1, num_bytes))
        return map_buffer(file, num_bytes)
    except (OSError, ValueError) as error:
        raise ConnectionLost(f"the buffer of the socket {name} can't be mapped: {error}") from error
    finally:
        os.close(file)


def _check_field(handle: Mapping[str, Any], field: str, pattern: re.Pattern[str]) -> str:
    """Return a field of a handle. No text shows the value: it may be a key."""
    value = handle.get(field)
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise ConnectionLost(
            f"the field {field!r} of the peer's buffer handle does not match {pattern.pattern}"
        )
    return value


def _check_file(file: int, *, number: object, num_bytes: int) -> None:
    """Refuse a file that is not the buffer of the handle, or may become shorter."""
    state = os.fstat(file)
    if (state.st_ino, state.st_size) != (number, num_bytes):
        raise ConnectionLost(
            f"the file is not the buffer of the handle: it has number {state.st_ino} and "
            f"{state.st_size} bytes instead of {num_bytes}"
        )
    if fcntl.fcntl(file, fcntl.F_GET_SEALS) & SEALS != SEALS:
        raise ConnectionLost("the buffer has a size that its worker may change")


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
