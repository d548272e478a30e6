"""What the trainer and one engine's worker have between them: a group of two (`groups`), or memory
that both see (`memory`).

Each engine has one of its own, so that none can hold up another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from relax_events.deadline import Deadline
from relax_events.errors import WeightsError
from relax_events.weights.broadcast.receive_buffers import ReceiveBuffer

MAX_PENDING_BUCKETS = 3
"""Buckets that either side has begun and not yet waited for: neither waits for the other between
two of them."""


class ConnectionLost(WeightsError):
    """The other side of a broadcast has gone, or did not do its part in time."""

    def __init__(self, text: str, *, reason: str = "lost") -> None:
        """Say what is wrong, and in a word, to count by."""
        super().__init__(text)
        self.reason = reason


class Transfer(Protocol):
    """A bucket under way."""

    def wait(self) -> None:
        """Wait until its bytes may be used again, or have arrived.

        Raises:
            LinkLost: Its deadline has passed, or the other side is gone.
        """
        ...


class Channel(Protocol):
    """Two that have agreed. After a `LinkLost` it is of no use any more."""

    def prepare_receive(self, row: ReceiveBuffer) -> Mapping[str, Any]:
        """Begin to receive a version into a row, as rank 1; give what the other side is to know of
        it.
        """
        ...

    def begin_send(self, invitation: object, *, num_bytes: int) -> None:
        """Begin to send a version, as rank 0, to who has invited it.

        Raises:
            LinkLost: What it says can't be used.
        """
        ...

    def send(self, data: Tensor, deadline: Deadline) -> Transfer:
        """Begin to send bytes, as rank 0; they must stay as they are until the transfer is waited
        for.
        """
        ...

    def receive(self, data: Tensor, deadline: Deadline) -> Transfer:
        """Begin to receive as many bytes as `data` has room for, as rank 1."""
        ...

    def abort(self) -> None:
        """End the group, from any thread. What is under way fails, with gloo by its deadline at the
        latest.
        """
        ...
