"""Starts a program with limits, and ends it with all its children when its worker is gone.

    worker --pipe--> this guard --> the program, in a process group of its own

Run as a script, without the library: it starts in milliseconds. The pipe is its stdin: when the
worker closes it, or dies, the guard kills the program with all its children, and deletes the
episode's folder. The program's exit code is the guard's.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import runpy
import select
import signal
import subprocess
import sys

PR_SET_CHILD_SUBREAPER = 36
NOT_STARTED = 127
KILLED = 137
FOLDER_PREFIX = "relax-episode-"
PRIVILEGES = os.path.join(os.path.dirname(__file__), "..", "..", "privileges.py")  # noqa: PTH118, PTH120


def main() -> int:
    """Run `guard MEMORY_BYTES FOLDER COMMAND...` until the program or the worker ends."""
    memory_bytes, folder, command = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    # children that leave the process group become ours instead of init's, and end with us
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    drop_ptrace()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    try:
        program = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    except OSError as error:
        print(f"can't start {command[0]}: {error.strerror}", file=sys.stderr)
        return NOT_STARTED
    handle = os.pidfd_open(program.pid)
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    poll.register(0, select.POLLIN | select.POLLHUP)
    while program.poll() is None:
        ready = dict(poll.poll())
        if handle in ready:
            break
        if 0 in ready and not os.read(0, 1):
            kill_all(program.pid)
            program.wait()
            delete_folder(folder)
            return KILLED
    code = program.wait()
    kill_all(program.pid)
    return code if code >= 0 else 128 - code


def drop_ptrace() -> None:
    """Give up the right of root to read the worker; see `relax_events.privileges`."""
    runpy.run_path(PRIVILEGES)["drop_ptrace"]()


def kill_all(group: int) -> None:
    """Kill a process group and every child that was handed to this process."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    while children := adopted_children():
        for child in children:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)


def delete_folder(folder: str) -> None:
    """Delete an episode's folder; nothing else is ever deleted."""
    import shutil  # not at the start, which it would make slower

    if os.path.basename(folder).startswith(FOLDER_PREFIX):  # noqa: PTH119
        shutil.rmtree(folder, ignore_errors=True)


def adopted_children() -> list[int]:
    """Return this process's children, including children of ended programs."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return [int(child) for child in file.read().split()]
    except OSError:
        return []


if __name__ == "__main__":
    sys.exit(main())
