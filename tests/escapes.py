"""A look for programs that a sandbox left."""

from __future__ import annotations

import time

import psutil

LEFT_SECONDS = 60.0


def programs_left() -> list[str]:
    """Return the command lines of our programs, or of orphans, that have not ended within a few
    seconds; other users' programs are ignored."""
    deadline = time.monotonic() + LEFT_SECONDS
    while (found := _programs()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def _programs() -> list[str]:
    ours = {process.pid for process in psutil.Process().children(recursive=True)}
    found = []
    for process in psutil.process_iter(["cmdline", "ppid", "status"]):
        is_program = any(
            one.endswith("sandbox/inside/entry.py") for one in process.info["cmdline"] or ()
        )
        if (
            is_program
            and process.info["status"] != psutil.STATUS_ZOMBIE
            and (process.pid in ours or process.info["ppid"] == 1)
        ):
            found.append(" ".join(process.info["cmdline"]))
    return found
