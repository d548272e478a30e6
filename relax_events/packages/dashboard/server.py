"""Serves the page on this machine until it is interrupted. As a program it serves the page of one
`relax run`: python -m ... RUN_FILE LISTENER_FD.
"""

from __future__ import annotations

import os
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from relax_events.api.errors import EnvironmentProblem
from relax_events.api.http import (
    build_server_config,
    build_url,
    drain_when_supervisor_exits,
    find_missing_package,
    open_listener,
)
from relax_events.api.log import Cluster
from relax_events.api.runs import load_run_config
from relax_events.packages.dashboard.access import PageAccess
from relax_events.packages.dashboard.registry import RunRegistry

HOST = "127.0.0.1"
MAX_CONNECTIONS = 512
SHUTDOWN_SECONDS = 2
DRAIN_SECONDS = 5.0
NICENESS, LOWEST_PRIORITY = 10, 19


def open_port(port: int) -> socket.socket:
    """Bind the page's port on the loopback address.

    Raises:
        EnvironmentProblem: The port is taken, or a package is not installed.
    """
    if missing := find_missing_package():
        raise EnvironmentProblem(f"{missing} is not installed; install relax-events[api]")
    remedies = "give another --port, or 0 for a free one", "give another --port"
    listener = open_listener(HOST, port, remedies=remedies, what="the dashboard")
    listener.listen()
    return listener


def give_way(niceness: int = NICENESS) -> None:
    """Give all threads of this process, and those that start later, a low priority.

    Where the kernel shares the processors between sessions first, a thread's priority counts among
    the threads of its own session alone. A process that leads a session lowers that too (Linux,
    sched(7), autogroups).

    Args:
        niceness: How much lower: 10 gives a thread a tenth of the time of a thread at 0. With the
            most, 19, a saturated machine answers no call within its deadline.
    """
    priority = min(os.getpriority(os.PRIO_PROCESS, 0) + niceness, LOWEST_PRIORITY)
    for thread in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # it has just ended
            os.setpriority(os.PRIO_PROCESS, int(thread.name), priority)
    if os.getsid(0) == os.getpid():
        with suppress(OSError):  # a kernel without it
            Path("/proc/self/autogroup").write_text(str(priority))


def build_server(registry: RunRegistry, access: PageAccess) -> Any:
    """Return uvicorn's server of the page; `run(sockets=[listener])` serves until its end."""
    import uvicorn

    from relax_events.packages.dashboard.app import build_app

    settings = build_server_config(
        build_app(registry, access, host=HOST),
        max_connections=MAX_CONNECTIONS,
        lifespan="off",
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
    )
    return uvicorn.Server(settings)


def main(run_file: str, listener_fd: str) -> None:
    """Serve until SIGTERM, or until `relax run` exits."""
    give_way()
    drain_when_supervisor_exits(drain_seconds=DRAIN_SECONDS)
    config = load_run_config(Path(run_file))
    registry = RunRegistry(Cluster.from_run_file(config), first=config)
    try:
        with socket.socket(fileno=int(listener_fd)) as listener:
            build_server(registry, PageAccess(config.run.directory)).run(sockets=[listener])
    finally:
        registry.close()


__all__ = ["HOST", "build_server", "build_url", "give_way", "open_port"]

if __name__ == "__main__":
    main(*sys.argv[1:])
