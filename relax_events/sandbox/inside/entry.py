"""The first process inside the sandbox: it isolates and starts the program, and finally kills all
its processes.

It uses only the standard library. Its argument is a JSON object:

    limits      resource limits, by their names in the module resource
    processes   how many processes the program may have at a time
    readable, writable   paths for Landlock; absent if it is not used
    filters     whether to install the seccomp filter
    may_signal  whether the program may send signals
    user        the user to switch to, or null
    binds       folders of the interpreter that the user can't access, with their mount points
    ready       a pipe, which receives one byte when the isolation is complete
    task        one of
        {"program": FILE}     run it with this process's stdin and stdout
        {"serve": FILE}       run it, then serve the requests of the tests
        {"tests": FILE, "requests": 5, "answers": 6, "verdict": 7}   run tests of a served solution

Exit codes: 0 for success, 77 for an exceeded limit or a signal, 78 for tests whose solution exited,
any other for a failure.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import resource
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import landlock
import seccomp

LIMIT_EXIT_CODE = 77
MAX_PROCESSES = 1 << 20
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
MS_READ_ONLY, MS_NO_SUID, MS_REMOUNT, MS_BIND, MS_RECURSIVE = 1, 2, 32, 4096, 16384


class Terminated(Exception):
    """SIGTERM arrived: the library ends the program."""


def main(setup: dict[str, Any]) -> int:
    """Start the program, wait for it, kill its remaining processes; return the exit code."""
    libc = ctypes.CDLL(None)
    signal.signal(signal.SIGTERM, _on_sigterm)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphaned processes become children of this one
    for source, target in setup["binds"]:
        _bind(source, target)
    child = os.fork()
    if child == 0:
        os._exit(_run(setup))
    os.close(setup["ready"])
    try:
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
    except Terminated:
        code = LIMIT_EXIT_CODE
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _kill_children()
    return LIMIT_EXIT_CODE if code < 0 else code


def _bind(source: str, target: str) -> None:
    """Bind-mount a folder in this mount namespace, and import modules from there."""
    Path(target).mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    flags = (MS_BIND | MS_RECURSIVE, MS_BIND | MS_REMOUNT | MS_READ_ONLY | MS_NO_SUID)
    for flag in flags:
        if libc.mount(source.encode(), target.encode(), None, flag, None):
            raise OSError(ctypes.get_errno(), f"mount {source}")
    for paths in (
        sys.path,
        *(
            module.__path__
            for module in list(sys.modules.values())
            if isinstance(getattr(module, "__path__", None), list)
        ),
    ):
        paths[:] = [
            target + path[len(source) :]
            if path == source or path.startswith(source + "/")
            else path
            for path in paths
        ]
    sys.path_importer_cache.clear()


def _on_sigterm(*_: object) -> None:
    raise Terminated


def _kill_children() -> None:
    """Kill children until none is left; an orphaned grandchild becomes a child of this process."""
    if os.getpid() == 1:
        return  # the kernel ends a PID namespace with its first process
    while True:
        for pid in _children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _children() -> list[int]:
    own, found = os.getpid(), []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()
            if int(fields[1]) == own:
                found.append(int(folder.name))
    return found


def _run(setup: dict[str, Any]) -> int:
    """Isolate this process, and run the task."""
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with contextlib.suppress(PermissionError):
            os.setsid()
        _isolate(setup)
        os.write(setup["ready"], b"1")
        os.close(setup["ready"])
        _run_task(setup["task"])
    except MemoryError:
        return LIMIT_EXIT_CODE
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else 0 if ending.code is None else 1
    except OSError as error:
        return LIMIT_EXIT_CODE if error.errno in (errno.EAGAIN, errno.ENOMEM) else 1
    except BaseException as error:
        return int(getattr(type(error), "exit_code", 1))
    else:
        code = 0
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    return code


def _isolate(setup: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(
            "1000"
        )  # if memory is exhausted, the kernel kills this process first
    for name, limit in setup["limits"].items():
        _set_limit(getattr(resource, name), limit)
    if setup["user"] is not None:
        os.setgroups([])
        os.setresgid(*[setup["user"]] * 3)
        os.setresuid(*[setup["user"]] * 3)
    _set_limit(resource.RLIMIT_NPROC, _count_processes() + setup["processes"])
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if "readable" in setup:
        landlock.restrict(readable=setup["readable"], writable=setup["writable"])
    if setup["filters"]:
        seccomp.restrict(may_signal=setup["may_signal"], may_start_processes=True)


def _set_limit(kind: int, wanted: int) -> None:
    """Set a limit, unless a lower one is set."""
    _, hard = resource.getrlimit(kind)
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(kind, (limit, limit))


def _count_processes() -> int:
    """Return the number of processes and threads that the kernel counts for this user.

    It is the highest limit under which no process can be started. It includes those of other
    containers, which are not visible here.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    highest = MAX_PROCESSES if hard == resource.RLIM_INFINITY else hard
    low, high = 0, 1
    while not _can_start(high, hard):
        if high == highest:
            return highest
        low, high = high, min(high * 2, highest)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _can_start(middle, hard) else (middle, high)
    return low


def _can_start(limit: int, hard: int) -> bool:
    try:
        resource.setrlimit(resource.RLIMIT_NPROC, (limit, hard))
        child = os.fork()
    except BlockingIOError:
        return False
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return True


def _run_task(task: dict[str, Any]) -> None:
    if "program" in task:
        runpy.run_path(task["program"], run_name="__main__")
    elif "serve" in task:
        from serve import serve

        serve(task["serve"])
    else:
        from run_tests import run_tests

        run_tests(task["tests"], task["requests"], task["answers"], task["verdict"])


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
