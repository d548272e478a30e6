"""The first process inside the sandbox: it isolates and starts one program after another, each in a
process of its own, and kills all of a program's processes before it starts the next.

It runs no code of a program itself. It uses only the standard library. Its argument is a JSON
object:

    limits      resource limits, by their names in the module resource
    processes   how many processes a program may have at a time
    folder      the folder of the programs
    own_files   bytes and number of files of the file system that each program gets as its folder,
                or null: then it uses the folder itself
    readable, writable   paths for Landlock
    landlock    the version of Landlock to use at most; 0 if it is not used
    filters     whether to install the seccomp filter
    may_signal  whether programs may send signals
    user        the user to switch to, or null
    binds       folders of the interpreter that the user can't access, with their mount points
    control     a socket, over which each task arrives with its open files; it ends at its end

A task is a JSON object, with `files`: the names of its files, in the order in which they arrive.

    {"program": FILE, "files": ["stdin", "stdout"]}     run it
    {"serve": FILE, "files": ["stdin", "stdout"]}       run it, then serve the requests of the tests
    {"tests": FILE, "files": ["requests", "answers", "verdict"]}   run tests of a served solution

The responses are `ready` when the program's isolation is complete, and then its exit code, when all
its processes have ended: 0 for success, 77 for an exceeded limit or a signal, 78 for tests whose
solution exited, any other for a failure.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import resource
import runpy
import select
import signal
import socket
import struct
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import landlock
import seccomp

LIMIT_EXIT_CODE = 77
MAX_TASK_BYTES, MAX_TASK_FILES = 64 * 1024, 8
MAX_PROCESSES = 1 << 20
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 1, 4, 36
CLONE_NEWNS = 0x00020000
MS_READ_ONLY, MS_NO_SUID, MS_NO_DEV, MS_REMOUNT, MS_BIND, MS_RECURSIVE = 1, 2, 4, 32, 4096, 16384
CAPABILITIES_VERSION = 0x20080522
LIMIT_ERRORS = (
    errno.EAGAIN,
    errno.ENOMEM,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
)
"""How a call fails that would exceed a limit on processes, memory or files."""


class Terminated(Exception):
    """SIGTERM arrived, or the library's process is gone: the program ends."""


def main(setup: dict[str, Any]) -> int:
    """Run the tasks that arrive, until there are no more; return the exit code."""
    libc = ctypes.CDLL(None)
    signal.signal(signal.SIGTERM, _on_sigterm)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphaned processes become children of this one
    try:
        for source, target in setup["binds"]:
            _bind(source, target)
        ended = _open_wakeup_pipe()
        with socket.socket(fileno=setup["control"]) as control:
            while True:
                task, *fds = _receive(control)
                if task is None:
                    return 0
                control.send(str(_run_apart(setup, task, fds, control, ended)).encode())
    except Terminated:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _kill_children()
        return LIMIT_EXIT_CODE


def _open_wakeup_pipe() -> tuple[int, int]:
    """Return both ends of a pipe that becomes readable when a child has ended."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    return reading, writing


def _receive(control: socket.socket) -> tuple[Any, ...]:
    """Wait for a task; return it and its open files, or None at the end."""
    data, fds, _, _ = socket.recv_fds(control, MAX_TASK_BYTES, MAX_TASK_FILES)
    return (json.loads(data) if data else None, *fds)


def _run_apart(
    setup: dict[str, Any],
    task: dict[str, Any],
    fds: list[int],
    control: socket.socket,
    ended: tuple[int, int],
) -> int:
    """Run a task in a process of its own, end all processes that it leaves; return its exit
    code.
    """
    _load(task)
    child = os.fork()
    if child == 0:
        signal.set_wakeup_fd(-1)
        for number in ended:
            os.close(number)
        os._exit(_run(setup, task, fds, control))
    for number in fds:
        os.close(number)
    code = _await_child(child, control, ended[0])
    _kill_children()
    return LIMIT_EXIT_CODE if code < 0 else code


def _load(task: dict[str, Any]) -> None:
    """Import what the task needs, once for all tasks."""
    if "serve" in task:
        import serve  # noqa: F401
    elif "tests" in task:
        import run_tests  # noqa: F401


def _await_child(child: int, control: socket.socket, ended: int) -> int:
    """Return the exit code of a child.

    Raises:
        Terminated: The library's process is gone: it sends nothing while a program runs.
    """
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        readable, _, _ = select.select([control.fileno(), ended], [], [])
        if control.fileno() in readable:
            raise Terminated
        os.read(ended, 1024)


def _bind(source: str, target: str) -> None:
    """Bind-mount a folder in this mount namespace, and import modules from there."""
    Path(target).mkdir()
    for flags in (MS_BIND | MS_RECURSIVE, MS_BIND | MS_REMOUNT | MS_READ_ONLY | MS_NO_SUID):
        _mount(source, target, flags)
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


def _mount(source: str, target: str, flags: int, kind: str = "", options: str = "") -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(source.encode(), target.encode(), kind.encode(), flags, options.encode()):
        raise OSError(ctypes.get_errno(), f"mount {source} on {target}")


def _on_sigterm(*_: object) -> None:
    raise Terminated


def _kill_children() -> None:
    """Kill children until none is left; an orphaned grandchild becomes a child of this process."""
    while True:
        for pid in [-1] if os.getpid() == 1 else _children():  # -1: all of the PID namespace
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _children() -> list[int]:
    pid, children = os.getpid(), []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()
            if int(fields[1]) == pid:
                children.append(int(folder.name))
    return children


def _run(
    setup: dict[str, Any], task: dict[str, Any], fds: list[int], control: socket.socket
) -> int:
    """Isolate this process, and run the task."""
    try:
        for number in (signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        with contextlib.suppress(PermissionError):
            os.setsid()
        files = dict(zip(task["files"], fds, strict=True))
        for standard, name in enumerate(("stdin", "stdout")):
            if name in files:
                os.dup2(files[name], standard)
                os.close(files[name])
        _isolate(setup)
        control.send(b"ready")
        control.close()
        _run_task(task, files)
    except MemoryError:
        return LIMIT_EXIT_CODE
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else 0 if ending.code is None else 1
    except OSError as error:
        return LIMIT_EXIT_CODE if error.errno in LIMIT_ERRORS else 1
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
    if setup["own_files"]:
        _mount_own_files(setup["folder"], setup["user"], *setup["own_files"])
    for name, limit in setup["limits"].items():
        _set_limit(getattr(resource, name), limit)
    if setup["user"] is not None:
        os.setgroups([])
        os.setresgid(*[setup["user"]] * 3)
        os.setresuid(*[setup["user"]] * 3)
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1)  # so that its files can be counted
    else:
        _drop_capabilities()
    _set_limit(resource.RLIMIT_NPROC, _count_processes() + setup["processes"])
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if setup["landlock"]:
        landlock.restrict(
            readable=setup["readable"], writable=setup["writable"], at_most=setup["landlock"]
        )
    if setup["filters"]:
        seccomp.restrict(may_signal=setup["may_signal"], may_start_processes=True)


def _mount_own_files(folder: str, user: int | None, num_bytes: int, num_files: int) -> None:
    """Give this process a file system in memory as its folder, with a copy of the folder's files.

    The kernel counts deleted files that are still open too, and deletes all with the last process.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "unshare the mounts")
    contents = {path: path.read_bytes() for path in Path(folder).iterdir()}
    owner = os.getuid() if user is None else user
    options = f"size={num_bytes},nr_inodes={num_files},mode=700,uid={owner},gid={owner}"
    _mount("tmpfs", folder, MS_NO_SUID | MS_NO_DEV, "tmpfs", options)
    for path, content in contents.items():
        path.write_bytes(content)
        path.chmod(0o644)
    os.chdir(folder)


def _drop_capabilities() -> None:
    """Give up the capabilities in the user namespace that this process was started in."""
    libc = ctypes.CDLL(None, use_errno=True)
    if os.getuid() and libc.capset(struct.pack("=Ii", CAPABILITIES_VERSION, 0), bytes(24)):
        raise OSError(ctypes.get_errno(), "drop capabilities")


def _set_limit(kind: int, value: int) -> None:
    """Set a limit, unless a lower one is set."""
    _, hard = resource.getrlimit(kind)
    limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
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


def _run_task(task: dict[str, Any], files: dict[str, int]) -> None:
    if "program" in task:
        runpy.run_path(task["program"], run_name="__main__")
    elif "serve" in task:
        from serve import serve

        serve(task["serve"])
    else:
        from run_tests import run_tests

        run_tests(task["tests"], files["requests"], files["answers"], files["verdict"])


if __name__ == "__main__":
    os._exit(main(json.loads(sys.argv[1])))
