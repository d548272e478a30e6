"""A module of ours that reads what strangers made, behind walls of its own: it may read its
interpreter and packages, and answer on its pipes.

Started as `python -m relax_events.sandbox.confined MODULE`. The walls stand before the module is
imported, so that no thread of a library is left outside. Where the kernel has no Landlock the
filter of system calls stands alone; media are no programs, so that is accepted, and said.
"""

from __future__ import annotations

import platform
import runpy
import sys
from pathlib import Path

import relax_events
from relax_events.sandbox.inside import landlock, seccomp
from relax_events.sandbox.walls import DEVICES, SYSTEM_FILES, SYSTEM_FOLDERS, list_interpreter_folders


def confine() -> None:
    """Give up files, network, other processes and the start of new ones, for good."""
    if landlock.version():
        package = str(Path(relax_events.__file__).parent)
        landlock.restrict(
            readable=[*SYSTEM_FOLDERS, *SYSTEM_FILES, *DEVICES, *list_interpreter_folders(), package],
            writable=["/dev/null"],
        )
    if platform.machine() in seccomp.ARCHITECTURES:
        seccomp.restrict(may_signal=False, may_start_processes=False)


if __name__ == "__main__":
    confine()
    module = sys.argv.pop(1)
    runpy.run_module(module, run_name="__main__", alter_sys=True)
