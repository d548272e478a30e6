"""Drains a worker when its supervisor exits, so that no worker outlives its `relax run`. Also
derives a container's worker index from its hostname.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time
import zlib

SUPERVISOR_PID_VARIABLE = "RELAX_SUPERVISOR_PID"


def drain_when_supervisor_exits(*, drain_seconds: float) -> None:
    """Drain when the supervisor exits. A worker that was started by hand has none.

    Args:
        drain_seconds: Time limit of the drain; then the process exits at once, and uncommitted work
            is delivered again.
    """
    supervisor = os.environ.get(SUPERVISOR_PID_VARIABLE)
    if supervisor is None:
        return
    try:
        handle = os.pidfd_open(int(supervisor))
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGTERM)
        return

    def wait() -> None:
        select.select([handle], [], [])
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(drain_seconds)
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=wait, name="supervisor-watch", daemon=True).start()


def worker_index_from_hostname() -> int:
    """Derive a worker's index from this machine's name.

    A container keeps its hostname over a restart. So the worker keeps its identity and recognises
    its own leases and partitions.
    """
    return zlib.crc32(socket.gethostname().encode())
