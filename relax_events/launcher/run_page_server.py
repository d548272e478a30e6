"""The process that serves the page of one `relax run`: python -m ... RUN_FILE LISTENER_FD."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

from relax_events.config import load_run_config
from relax_events.dashboard.access import PageAccess
from relax_events.dashboard.registry import RunRegistry
from relax_events.dashboard.server import build_server, give_way
from relax_events.history.cluster import Cluster
from relax_events.launcher.parent_watch import drain_when_supervisor_exits

DRAIN_SECONDS = 5.0


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


if __name__ == "__main__":
    main(*sys.argv[1:])
