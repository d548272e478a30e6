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
from relax_events.weights.broadcast.channel import LinkLost, Transfer
from relax_events.weights.broadcast.control_socket import Line
from relax_events.weights.broadcast.receive_buffers import NAME, Row, mapped

KEY_BYTES = 16
NUM_ROWS = 2
"""That a worker receives into in turn."""


class Sample(Row):
    """A row by which the trainer finds out whether it is on our machine."""

    def __init__(self) -> None:
        """Fill it with what nobody can guess."""
        super().__init__(KEY_BYTES)
        key = secrets.token_bytes(KEY_BYTES)
        self.data.copy_(torch.frombuffer(bytearray(key), dtype=torch.uint8))
        self.name |= {"key": key.hex()}


def is_here(sample: object) -> bool:
    """Tell whether a worker's memory can be reached from here, by the name of its `Sample`."""
    try:
        found = bytes(reached(sample, KEY_BYTES).numpy())
    except LinkLost:
        return False
    return isinstance(sample, Mapping) and hmac.compare_digest(
        found.hex().encode(), str(sample.get("key")).encode()
    )


def reached(name: object, num_bytes: int) -> UInt8[Tensor, " bytes"]:
    """Open a row of another process, to write into.

    Args:
        name: What the other side says that its row's is.
        num_bytes: Its size.
    Raises:
        LinkLost: There is none of this name and size.
    """
    if not isinstance(name, Mapping):
        raise LinkLost(f"it names its row {name!r}")
    path = Path("/proc", str(name.get("process")), "fd", str(name.get("file")))
    try:
        if not path.readlink().name.startswith(f"memfd:{NAME} "):
            raise LinkLost(f"{path} is no row of weights")
        with path.open("r+b", buffering=0) as file:
            state = os.fstat(file.fileno())
            if (state.st_ino, state.st_size) != (name.get("number"), max(1, num_bytes)):
                raise LinkLost(f"{path} is another row than the one that was told of")
            return mapped(file.fileno(), num_bytes)
    except (OSError, ValueError) as error:
        raise LinkLost(f"{path} can't be reached: {error}") from error


class MemoryPair:
    """See `Pair`. On the line stands how far a row is written, and how far the other side has
    followed.
    """

    def __init__(self, line: Line) -> None:
        """Use the line on which both sides have agreed."""
        self._line = line
        self._rows: dict[str, Tensor] = {}
        self._row = torch.empty(0, dtype=torch.uint8)
        self._begun = self._heard = 0

    def invite(self, row: Row) -> Mapping[str, Any]:
        """See `Pair.invite`."""
        self._begun = self._heard = 0
        return row.name

    def begin(self, invitation: object, *, num_bytes: int) -> None:
        """See `Pair.begin`."""
        self._begun = self._heard = 0
        name = json.dumps(invitation)
        self._row = self._rows.pop(name) if name in self._rows else reached(invitation, num_bytes)
        self._rows = dict([*self._rows.items(), (name, self._row)][-NUM_ROWS:])

    def send(self, data: Tensor, deadline: Deadline) -> Transfer:
        """See `Pair.send`."""
        self._row[self._begun : self._begun + len(data)].copy_(data)
        self._begun += len(data)
        self._line.say(deadline=deadline, written=self._begun)
        return Written(self, self._begun, deadline)

    def receive(self, data: Tensor, deadline: Deadline) -> Transfer:
        """See `Pair.receive`."""
        self._begun += len(data)
        return Coming(self, self._begun, deadline)

    def hear(self, word: str, end: int, deadline: Deadline) -> None:
        """Wait until the other side is as far.

        Raises:
            LinkLost: It is not, in time.
        """
        while self._heard < end:
            message = self._line.hear(deadline)
            if not isinstance(message.get(word), int):
                raise LinkLost(f"it speaks out of turn: {message}")
            self._heard = message[word]

    def follow(self, end: int, deadline: Deadline) -> None:
        """Say how far we are."""
        self._line.say(deadline=deadline, followed=end)

    def abort(self) -> None:
        """See `Pair.abort`."""
        self._line.hang_up()


@dataclass(frozen=True, slots=True)
class Written:
    """A bucket that the other side has not followed to. See `Transfer`."""

    pair: MemoryPair
    end: int
    deadline: Deadline

    def wait(self) -> None:
        """See `Transfer.wait`."""
        self.pair.hear("followed", self.end, self.deadline)


@dataclass(frozen=True, slots=True)
class Coming:
    """A bucket that may not be written yet. See `Transfer`."""

    pair: MemoryPair
    end: int
    deadline: Deadline

    def wait(self) -> None:
        """See `Transfer.wait`."""
        self.pair.hear("written", self.end, self.deadline)
        self.pair.follow(self.end, self.deadline)
