"""The line on which trainer and engine's worker agree about each transfer: JSON, one message a
line, over TCP.

    worker    {"ticket", "worker_id", "memory"}                  --> trainer     let me in; can you see this memory?
    trainer   {"way", "meeting_port", "group", "bucket_bytes"}   --> worker      you write into mine ("memory"), or both form the group
    trainer   {"policy_version", "layout"}                       --> worker      here comes a version
    worker    {"takes": true, "row"} | {"takes": false}          --> trainer     the buckets follow, or don't
    trainer   {"written"}, worker {"followed"}                                   bytes of the row, where memory is shared
    worker    {"digest"}                                         --> trainer     what has arrived

A line that ends tells the other side at once that its partner is gone.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import orjson

from relax_events.deadline import Deadline
from relax_events.weights.broadcast.channel import ConnectionLost

MAX_MESSAGE_BYTES = 65536


class ControlSocket:
    """One end. Each message is sent and awaited within a deadline; `hang_up` may come from any
    thread.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._buffer = bytearray()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @classmethod
    def connect(cls, host: str, port: int, *, deadline: Deadline) -> ControlSocket:
        """Connect to a trainer.

        Raises:
            LinkLost: It is not there.
        """
        try:
            return cls(
                socket.create_connection(
                    (host, port), timeout=max(0.001, deadline.remaining_seconds)
                )
            )
        except OSError as error:
            raise ConnectionLost(f"no trainer at {host}:{port}: {error}") from error

    @property
    def own_host(self) -> str:
        """Address of this machine, as the other side sees it."""
        return str(self._socket.getsockname()[0])

    def fileno(self) -> int:
        """Let the line be waited for together with other things."""
        return self._socket.fileno()

    def send(self, *, deadline: Deadline, **message: Any) -> None:
        """Send a message.

        Raises:
            LinkLost: Nobody takes it.
        """
        try:
            self._socket.settimeout(max(0.001, deadline.remaining_seconds))
            self._socket.sendall(orjson.dumps(message) + b"\n")
        except OSError as error:
            raise ConnectionLost(f"the other side takes no message: {error}") from error

    def receive(self, deadline: Deadline | None = None) -> dict[str, Any]:
        """Wait for the next message, without a deadline where silence is in order.

        Raises:
            LinkLost: None came, or none that can be read.
        """
        while b"\n" not in self._buffer:
            if len(self._buffer) > MAX_MESSAGE_BYTES:
                raise ConnectionLost(
                    f"the other side sent more than {MAX_MESSAGE_BYTES} bytes without an end"
                )
            self._buffer += self._read(deadline)
        text, _, rest = bytes(self._buffer).partition(b"\n")
        self._buffer = bytearray(rest)
        try:
            message = orjson.loads(text)
        except ValueError as error:
            raise ConnectionLost(f"the other side sent no JSON: {error}") from error
        if not isinstance(message, dict):
            raise ConnectionLost(f"the other side sent {message!r}, not a message")
        return message

    def _read(self, deadline: Deadline | None) -> bytes:
        try:
            self._socket.settimeout(
                None if deadline is None else max(0.001, deadline.remaining_seconds)
            )
            data = self._socket.recv(MAX_MESSAGE_BYTES)
        except TimeoutError as error:
            raise ConnectionLost("the other side did not answer in time") from error
        except OSError as error:
            raise ConnectionLost(f"the line broke: {error}") from error
        if not data:
            raise ConnectionLost("the other side has left")
        return data

    def shut_down(self) -> None:
        """End the line; whoever waits on it, on either side, is told."""
        with suppress(OSError):  # the other side was faster
            self._socket.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shut_down()
        self._socket.close()
