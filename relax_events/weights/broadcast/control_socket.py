"""The control connection on which trainer and engine's worker agree about each transfer: JSON over
TCP, one message a line.

    worker    {"join_token", "worker_id", "memory"}                    --> trainer     request to
    join; can you map this memory? trainer   {"transport", "rendezvous_port", "group",
    "bucket_bytes"}  --> worker    "memory": the trainer writes into the worker's buffers; else a
    process group trainer   {"policy_version", "layout"}                             --> worker
    a version is offered worker    {"accepts": true, "buffer"} | {"accepts": false}         -->
    trainer     send the buckets, or skip the version trainer   {"written"}, worker {"read"} bytes
    of the buffer, with shared memory worker {"digest"} --> trainer     digest of the received
    version

Either side notices at once when the other one closes the connection.
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
    """One end of the connection. Each message is sent and awaited within a deadline. `shut_down`
    may be called from any thread.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._buffer = bytearray()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @classmethod
    def connect(cls, host: str, port: int, *, deadline: Deadline) -> ControlSocket:
        """Connect to a trainer.

        Raises:
            ConnectionLost: No trainer listens there.
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
        """Address of this machine, as the peer sees it."""
        return str(self._socket.getsockname()[0])

    def fileno(self) -> int:
        """Return the file descriptor, for selectors."""
        return self._socket.fileno()

    def send(self, *, deadline: Deadline, **message: Any) -> None:
        """Send a message.

        Raises:
            ConnectionLost: The peer does not receive it.
        """
        try:
            self._socket.settimeout(max(0.001, deadline.remaining_seconds))
            self._socket.sendall(orjson.dumps(message) + b"\n")
        except OSError as error:
            raise ConnectionLost(f"the peer receives no message: {error}") from error

    def receive(self, deadline: Deadline | None = None) -> dict[str, Any]:
        """Wait for the next message; without a deadline, for as long as the peer is connected.

        Raises:
            ConnectionLost: None came, or it is invalid.
        """
        while b"\n" not in self._buffer:
            if len(self._buffer) > MAX_MESSAGE_BYTES:
                raise ConnectionLost(
                    f"the peer sent more than {MAX_MESSAGE_BYTES} bytes without a line end"
                )
            self._buffer += self._read(deadline)
        text, _, rest = bytes(self._buffer).partition(b"\n")
        self._buffer = bytearray(rest)
        try:
            message = orjson.loads(text)
        except ValueError as error:
            raise ConnectionLost(f"the peer sent no JSON: {error}") from error
        if not isinstance(message, dict):
            raise ConnectionLost(f"the peer sent {message!r}, not a message")
        return message

    def _read(self, deadline: Deadline | None) -> bytes:
        try:
            self._socket.settimeout(
                None if deadline is None else max(0.001, deadline.remaining_seconds)
            )
            data = self._socket.recv(MAX_MESSAGE_BYTES)
        except TimeoutError as error:
            raise ConnectionLost("the peer did not respond before the deadline") from error
        except OSError as error:
            raise ConnectionLost(f"the connection broke: {error}") from error
        if not data:
            raise ConnectionLost("the peer has disconnected")
        return data

    def shut_down(self) -> None:
        """Shut the connection down; a pending `receive` on either side fails."""
        with suppress(OSError):  # the peer was faster
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
