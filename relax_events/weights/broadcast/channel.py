"""The data channel between the trainer and one engine's worker: a process group of two
(`process_groups`) or shared memory (`shared_memory`).

Each engine has its own channel, so a slow engine delays no other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from relax_events.deadline import Deadline
from relax_events.errors import WeightsError
from relax_events.weights.broadcast.receive_buffers import ReceiveBuffer

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
        """Prepare to receive a version into a buffer, as rank 1; return what the sender must know
        of the buffer.
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
