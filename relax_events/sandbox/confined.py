"""Runs one of our modules that parses untrusted files in isolation: it may read its interpreter and
packages, and use its pipes.

Started as `python -m relax_events.sandbox.confined MODULE`. The isolation starts before the module
is imported, so that it covers all threads of libraries. Without Landlock in the kernel only the
filter of system calls applies; this is accepted and reported, because media are not programs.
"""

from __future__ import annotations

import platform
import runpy
import sys
from pathlib import Path

import relax_events
from relax_events.sandbox.inside import landlock, seccomp
from relax_events.sandbox.isolation import (
    DEVICES,
    SYSTEM_FILES,
    SYSTEM_FOLDERS,
    list_interpreter_folders,
)


def confine() -> None:
    """Permanently give up access to files, network and other processes, and the right to start
    processes.
    """
    if landlock.version():
        package = str(Path(relax_events.__file__).parent)
        landlock.restrict(
            readable=[
                *SYSTEM_FOLDERS,
                *SYSTEM_FILES,
                *DEVICES,
                *list_interpreter_folders(),
                package,
            ],
            writable=["/dev/null"],
        )
    if platform.machine() in seccomp.ARCHITECTURES:
        seccomp.restrict(may_signal=False, may_start_processes=False)


if __name__ == "__main__":
    confine()
    module = sys.argv.pop(1)
    runpy.run_module(module, run_name="__main__", alter_sys=True)
