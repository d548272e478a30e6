"""Workers end with the `relax run` that started them, however it ends: nobody is left to consume
for a run that nobody watches.

Tells replicas of one role apart that were all started by the same command line.
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
    """Drain when the supervisor is gone. A worker that was started by hand has none and is left
    alone.

    Args:
        drain_seconds: After so long the process ends at once, as the supervisor would have had it:
            what was not committed is delivered again.
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

    A container keeps its name when it is started again, so its worker is the same one, and what it
    held is found to be its own.
    """
    return zlib.crc32(socket.gethostname().encode())
