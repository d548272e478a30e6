"""The first process inside the sandbox: it isolates and starts the program, and finally kills all
its processes.

Standard library alone. Its argument is a JSON object: `limits` by the names of the resource module,
`processes` that the program may have at a time, `readable` and `writable` paths for Landlock
(absent where another wall stands around files), `may_signal`, `user` to become or null, `ready`, a
pipe that gets one byte once the walls stand, and `task`, one of

    {"program": FILE}                                       run it; stdin and stdout are its own
    {"serve": FILE}                                         run it, then serve the tests' requests
    {"judge": FILE, "requests": 5, "answers": 6, "verdict": 7}   run tests against a served solution

`binds` are folders of the interpreter that `user` can't reach, and names under which it can.

Exit code 0 is success, 77 a limit that the program ran into or a signal that ended it, 78 tests
whose solution is gone, everything else a failure.
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
MAX_COUNTED = 1 << 20
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
MS_READ_ONLY, MS_NO_SUID, MS_REMOUNT, MS_BIND, MS_RECURSIVE = 1, 2, 32, 4096, 16384


class Ended(Exception):
    """The grader asks the program to end."""


def main(setup: dict[str, Any]) -> int:
    """Start the program, wait for it, kill its remaining processes; return the exit code."""
    libc = ctypes.CDLL(None)
    signal.signal(signal.SIGTERM, _end)
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
    except Ended:
        code = LIMIT_EXIT_CODE
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _end_children()
    return LIMIT_EXIT_CODE if code < 0 else code


def _bind(source: str, target: str) -> None:
    """Bind-mount a folder in this mount namespace, and import modules from there."""
    Path(target).mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    flags = (MS_BIND | MS_RECURSIVE, MS_BIND | MS_REMOUNT | MS_READ_ONLY | MS_NO_SUID)
    for one in flags:
        if libc.mount(source.encode(), target.encode(), None, one, None):
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


def _end(*_: object) -> None:
    raise Ended


def _end_children() -> None:
    """Kill children until there are none; grandchildren become children as their parents die."""
    if os.getpid() == 1:
        return  # the namespace ends with us
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
        _build(setup)
        os.write(setup["ready"], b"1")
        os.close(setup["ready"])
        _do(setup["task"])
    except MemoryError:
        return LIMIT_EXIT_CODE
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 0 if leaving.code is None else 1
    except OSError as error:
        return LIMIT_EXIT_CODE if error.errno in (errno.EAGAIN, errno.ENOMEM) else 1
    except BaseException as error:
        return int(getattr(type(error), "exit_code", 1))
    else:
        code = 0
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    return code


def _build(setup: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(
            "1000"
        )  # if memory runs out, the kernel kills this process first
    for name, limit in setup["limits"].items():
        _limit(getattr(resource, name), limit)
    if setup["user"] is not None:
        os.setgroups([])
        os.setresgid(*[setup["user"]] * 3)
        os.setresuid(*[setup["user"]] * 3)
    _limit(resource.RLIMIT_NPROC, _num_counted() + setup["processes"])
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if "readable" in setup:
        landlock.restrict(readable=setup["readable"], writable=setup["writable"])
    if setup["filters"]:
        seccomp.restrict(may_signal=setup["may_signal"], may_start_processes=True)


def _limit(kind: int, wanted: int) -> None:
    """Set a limit, unless a lower one is set."""
    _, hard = resource.getrlimit(kind)
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(kind, (limit, limit))


def _num_counted() -> int:
    """Return how many processes and threads the kernel counts for this user: the highest limit
    under which no more can be started.

    It counts those of other containers too, which can't be seen from this one.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    highest = MAX_COUNTED if hard == resource.RLIM_INFINITY else hard
    few, enough = 0, 1
    while not _can_start(enough, hard):
        if enough == highest:
            return highest
        few, enough = enough, min(enough * 2, highest)
    while enough - few > 1:
        middle = (few + enough) // 2
        few, enough = (few, middle) if _can_start(middle, hard) else (middle, enough)
    return few


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


def _do(task: dict[str, Any]) -> None:
    if "program" in task:
        runpy.run_path(task["program"], run_name="__main__")
    elif "serve" in task:
        from serve import serve

        serve(task["serve"])
    else:
        from judge import judge

        judge(task["judge"], task["requests"], task["answers"], task["verdict"])


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
