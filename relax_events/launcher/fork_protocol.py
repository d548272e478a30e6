"""What the starter is asked for and what it tells, in messages of JSON with descriptors beside
them.

The environment of workers.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from relax_events.kafka.credentials import SHARED_VARIABLES
from relax_events.launcher.parent_watch import SUPERVISOR_PID_VARIABLE

MAX_BYTES = 2**20
MAX_DESCRIPTORS = 2


@dataclass(frozen=True, slots=True)
class SpawnRequest:
    """A worker to be started.

    Attributes:
        module: What it runs, as `python -m` does.
        arguments: What that is told.
        environment: All of its own.
        imports: Modules that are there before it is forked: they are imported for the first alone
            that needs them.
        socket_variable: The variable that names the descriptor of a socket which is handed to the
            worker; empty where there is none.
    """

    module: str
    arguments: list[str]
    environment: dict[str, str]
    imports: list[str]
    socket_variable: str = ""


def send(line: socket.socket, message: Mapping[str, Any], *descriptors: int) -> None:
    """Send a message: what shall be imported, an order, who was started, who has ended."""
    socket.send_fds(line, [orjson.dumps(message)], list(descriptors))


def receive(line: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Receive a message, and the descriptors beside it; None when nobody is left to send one."""
    content, descriptors, _, _ = socket.recv_fds(line, MAX_BYTES, MAX_DESCRIPTORS)
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    return (orjson.loads(content), descriptors) if content else None


def worker_environment() -> dict[str, str]:
    """Return that of a process of ours: single-threaded numerics unless the user says otherwise, no
    hub look-ups.
    """
    defaults = {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
    return {**defaults, **os.environ, SUPERVISOR_PID_VARIABLE: str(os.getpid())}


def shared_environment() -> dict[str, str]:
    """Return what all workers have in theirs, and no secrets."""
    return {
        name: value for name, value in worker_environment().items() if name not in SHARED_VARIABLES
    }
