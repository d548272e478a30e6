"""Memory that the trainer and a worker of the same machine share: what is written there has
arrived, and nothing is sent.

A row is an anonymous file in memory, of the worker's. The trainer opens it by way of /proc, which
takes the same user in the same container, or on the same machine outside of any. Nothing of it is
left behind, however either side ends. A row that was lost with its line is never received into
again: a trainer that wakes up late writes where nobody reads.
"""

from __future__ import annotations

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
from relax_events.weights.broadcast.channel import ConnectionLost, Transfer
from relax_events.weights.broadcast.control_socket import ControlSocket
from relax_events.weights.broadcast.receive_buffers import NAME, ReceiveBuffer, map_buffer

KEY_BYTES = 16
NUM_BUFFERS = 2
"""That a worker receives into in turn."""


class SameHostProbe(ReceiveBuffer):
    """A row by which the trainer finds out whether it is on our machine."""

    def __init__(self) -> None:
        """Fill it with what nobody can guess."""
        super().__init__(KEY_BYTES)
        key = secrets.token_bytes(KEY_BYTES)
        self.data.copy_(torch.frombuffer(bytearray(key), dtype=torch.uint8))
        self.handle |= {"key": key.hex()}


def is_on_same_host(sample: object) -> bool:
    """Tell whether a worker's memory can be reached from here, by the name of its `Sample`."""
    try:
        found = bytes(map_remote_buffer(sample, KEY_BYTES).numpy())
    except ConnectionLost:
        return False
    return isinstance(sample, Mapping) and hmac.compare_digest(
        found.hex().encode(), str(sample.get("key")).encode()
    )


def map_remote_buffer(name: object, num_bytes: int) -> UInt8[Tensor, " bytes"]:
    """Open a row of another process, to write into.

    Args:
        name: What the other side says that its row's is.
        num_bytes: Its size.
    Raises:
        LinkLost: There is none of this name and size.
    """
    if not isinstance(name, Mapping):
        raise ConnectionLost(f"it names its row {name!r}")
    path = Path("/proc", str(name.get("process")), "fd", str(name.get("file")))
    try:
        if not path.readlink().name.startswith(f"memfd:{NAME} "):
            raise ConnectionLost(f"{path} is no row of weights")
        with path.open("r+b", buffering=0) as file:
            state = os.fstat(file.fileno())
            if (state.st_ino, state.st_size) != (name.get("number"), max(1, num_bytes)):
                raise ConnectionLost(f"{path} is another row than the one that was told of")
            return map_buffer(file.fileno(), num_bytes)
    except (OSError, ValueError) as error:
        raise ConnectionLost(f"{path} can't be reached: {error}") from error


class SharedMemoryChannel:
    """See `Pair`. On the line stands how far a row is written, and how far the other side has
    followed.
    """

    def __init__(self, line: ControlSocket) -> None:
        """Use the line on which both sides have agreed."""
        self._line = line
        self._rows: dict[str, Tensor] = {}
        self._row = torch.empty(0, dtype=torch.uint8)
        self._begun = self._heard = 0

    def invite(self, row: ReceiveBuffer) -> Mapping[str, Any]:
        """See `Pair.invite`."""
        self._begun = self._heard = 0
        return row.handle

    def begin(self, invitation: object, *, num_bytes: int) -> None:
        """See `Pair.begin`."""
        self._begun = self._heard = 0
        name = json.dumps(invitation)
        self._row = self._rows.pop(name) if name in self._rows else map_remote_buffer(invitation, num_bytes)
        self._rows = dict([*self._rows.items(), (name, self._row)][-NUM_BUFFERS:])

    def send(self, data: Tensor, deadline: Deadline) -> Transfer:
        """See `Pair.send`."""
        self._row[self._begun : self._begun + len(data)].copy_(data)
        self._begun += len(data)
        self._line.send(deadline=deadline, written=self._begun)
        return PendingWrite(self, self._begun, deadline)

    def receive(self, data: Tensor, deadline: Deadline) -> Transfer:
        """See `Pair.receive`."""
        self._begun += len(data)
        return PendingRead(self, self._begun, deadline)

    def wait_for_progress(self, word: str, end: int, deadline: Deadline) -> None:
        """Wait until the other side is as far.

        Raises:
            LinkLost: It is not, in time.
        """
        while self._heard < end:
            message = self._line.receive(deadline)
            if not isinstance(message.get(word), int):
                raise ConnectionLost(f"it speaks out of turn: {message}")
            self._heard = message[word]

    def acknowledge(self, end: int, deadline: Deadline) -> None:
        """Say how far we are."""
        self._line.send(deadline=deadline, followed=end)

    def abort(self) -> None:
        """See `Pair.abort`."""
        self._line.shut_down()


@dataclass(frozen=True, slots=True)
class PendingWrite:
    """A bucket that the other side has not followed to. See `Transfer`."""

    pair: SharedMemoryChannel
    end: int
    deadline: Deadline

    def wait(self) -> None:
        """See `Transfer.wait`."""
        self.pair.wait_for_progress("followed", self.end, self.deadline)


@dataclass(frozen=True, slots=True)
class PendingRead:
    """A bucket that may not be written yet. See `Transfer`."""

    pair: SharedMemoryChannel
    end: int
    deadline: Deadline

    def wait(self) -> None:
        """See `Transfer.wait`."""
        self.pair.wait_for_progress("written", self.end, self.deadline)
        self.pair.acknowledge(self.end, self.deadline)
