"""Messages between the supervisor and the fork server: JSON with file descriptors. Also the
workers' environment.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from relax_events.objects.credentials import remove_store_credentials
from relax_events.runtime.parent_watch import SUPERVISOR_PID_VARIABLE
from relax_events.session.principals import SHARED_VARIABLES

MAX_BYTES = 2**20
MAX_DESCRIPTORS = 2


@dataclass(frozen=True, slots=True)
class SpawnRequest:
    """A worker to start.

    Attributes:
        module: The module to run, as `python -m` does.
        arguments: Its command-line arguments.
        environment: Its whole environment.
        imports: Modules that are imported before the fork; the first worker that needs them pays.
        socket_variable: The environment variable that names the descriptor of an inherited socket;
            empty without a socket.
    """

    module: str
    arguments: list[str]
    environment: dict[str, str]
    imports: list[str]
    socket_variable: str = ""


def send(channel: socket.socket, message: Mapping[str, Any], *descriptors: int) -> None:
    """Send a message: imports, a spawn request, a started worker, an exit."""
    socket.send_fds(channel, [orjson.dumps(message)], list(descriptors))


def receive(channel: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Receive a message and its descriptors; None when the peer has closed the connection."""
    content, descriptors, _, _ = socket.recv_fds(channel, MAX_BYTES, MAX_DESCRIPTORS)
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    return (orjson.loads(content), descriptors) if content else None


def worker_environment() -> dict[str, str]:
    """Return the environment of a worker: single-threaded numerics unless the user sets it
    otherwise, and no look-ups on the model hub.
    """
    defaults = {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
    return {**defaults, **os.environ, SUPERVISOR_PID_VARIABLE: str(os.getpid())}


def shared_environment() -> dict[str, str]:
    """Return the environment that all workers share, without secrets."""
    environment = remove_store_credentials(worker_environment())
    return {name: value for name, value in environment.items() if name not in SHARED_VARIABLES}
