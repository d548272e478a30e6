"""Sends the attacks of `relax_events.attacks.http_requests` over a socket."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from relax_events.attacks.http_requests import CLOSED, HttpAttack

SECONDS = 120.0
SEND_BUFFER_BYTES = 65_536


@dataclass(frozen=True, slots=True)
class Answer:
    """A server's answer: its status, whether it closed the connection, and the bytes of the body
    that it or the kernel took.
    """

    status: int
    num_bytes: int


def send(attack: HttpAttack, *, port: int) -> Answer:
    """Send an attack until the server answers or closes, and return its answer."""
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        connection.settimeout(SECONDS)
        connection.connect(("127.0.0.1", port))
        num_bytes = 0
        try:
            connection.sendall(attack.head)
            for piece in attack.body():
                connection.sendall(piece)
                num_bytes += len(piece)
        except (BrokenPipeError, ConnectionResetError):
            pass
        return Answer(_read_status(connection), num_bytes)


def _read_status(connection: socket.socket) -> int:
    """Return the status; the server closes, or has answered."""
    answer = b""
    try:
        while b"\r\n\r\n" not in answer and (piece := connection.recv(4096)):
            answer += piece
    except ConnectionResetError:
        pass
    return int(answer.split()[1]) if answer.startswith(b"HTTP/1.1 ") else CLOSED
