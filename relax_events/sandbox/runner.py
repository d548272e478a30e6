"""Runs one program after another in isolation, with limits on time, and on memory, processes and
files of a program's whole process tree.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import orjson
import psutil

from relax_events.errors import RewardError
from relax_events.sandbox.file_usage import exceeds_file_limits
from relax_events.sandbox.inside.entry import LIMIT_EXIT_CODE
from relax_events.sandbox.isolation import (
    ENTRY,
    Isolation,
    build_bubblewrap_command,
    build_setup,
)

MAX_PROCESSES = 32
MAX_OPEN_FILES = 64
MAX_FILE_BYTES = 16 * 1024**2
MAX_FOLDER_BYTES = 64 * 1024**2
MAX_FILES = 4096
"""Files and folders, deleted ones that are still open included."""
MAX_COUNTED_FILE_BYTES = MAX_FOLDER_BYTES // MAX_PROCESSES
"""Of a file where files are counted at intervals: a process must not fill the disk in between."""
MAX_RESPONSE_BYTES = 64
READY = b"ready"
SETUP_SECONDS = 30.0
END_SECONDS = 5.0
KILL_POLL_SECONDS = 0.005
FIRST_CHECK_SECONDS = 0.1
CHECK_SECONDS = 0.05
WRAPPER_PROCESSES = 3
"""The processes that start the program."""
SHARED_BYTES = 16 * 1024**2
"""The interpreter's memory, which is counted for each process although it is shared."""


class Verdict(StrEnum):
    """The outcome of a program."""

    PASSED = "passed"
    FAILED = "failed"
    OUT_OF_LIMITS = "out_of_limits"


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one run of a program, including the processes that it starts."""

    seconds: float = 4.0
    memory_bytes: int = 512 * 1024**2


class Runner:
    """Isolation in which one program runs after another, each in a process of its own.

    The first process inside starts them and runs nothing else. A program starts in an empty folder,
    and none of its processes is left when the next one starts.
    """

    def __init__(self, isolation: Isolation, limits: Limits, folder: Path) -> None:
        """Start the first process; no program runs yet.

        Args:
            isolation: The isolation.
            limits: The limits of each program.
            folder: The folder that the programs may write to; it is created.
        """
        self._isolation, self._limits = isolation, limits
        self.folder = folder
        self.code: int | None = None
        """The exit code of the last program, if it has ended by itself."""
        self._is_running = False
        folder.mkdir()
        if isolation.user is not None:
            os.chown(folder, isolation.user, isolation.user)
        self._control, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        setup = build_setup(
            isolation,
            folder=folder,
            limits=self._resource_limits(),
            processes=MAX_PROCESSES,
            own_files=(MAX_FOLDER_BYTES, MAX_FILES),
            control=control.fileno(),
        )
        prefix = (
            build_bubblewrap_command(isolation, folder=folder)
            if isolation.has_private_root
            else list(isolation.command)
        )
        with control:
            self._process = subprocess.Popen(
                [*prefix, isolation.python, "-I", "-B", str(ENTRY), setup],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd=folder,
                env={
                    "PATH": "/usr/bin:/bin",
                    "HOME": str(folder),
                    "TMPDIR": str(folder),
                    "LANG": "C.UTF-8",
                    "OMP_NUM_THREADS": "1",
                },
                pass_fds=[control.fileno()],
            )

    @property
    def is_usable(self) -> bool:
        """Whether another program may start: none runs, and the last one has left nothing."""
        return (
            not self._is_running
            and self._process.poll() is None
            and not self._isolation.keeps_files
            and self._is_empty()
        )

    def start(self, task: Mapping[str, object], files: Mapping[str, int]) -> None:
        """Start a program, and wait until it is isolated.

        Args:
            task: The task, see `inside.entry`.
            files: The program's open files, by name.
        Raises:
            RewardError: The isolation could not be set up.
        """
        self.code, self._is_running = None, True
        message = orjson.dumps({**task, "files": list(files)})
        with contextlib.suppress(OSError):  # it has ended: there will be no response
            socket.send_fds(self._control, [message], list(files.values()))
        if self._receive(SETUP_SECONDS) != READY:
            self.end()
            raise RewardError(
                f"the sandbox could not be set up within {SETUP_SECONDS:g} s (exit code "
                f"{self._process.returncode})"
            )

    def finish(self, deadline: float) -> Verdict:
        """Wait until the program and its processes end, and empty the folder; return its verdict.

        At the deadline, or when the program exceeds the limits, the whole isolation ends.

        Args:
            deadline: The deadline, on the monotonic clock.
        """
        interval = FIRST_CHECK_SECONDS
        while True:
            response = self._receive(max(0.0, min(interval, deadline - time.monotonic())))
            if response is not None:
                break
            interval = CHECK_SECONDS
            if self._exceeds_limits() or time.monotonic() >= deadline:
                self.end()
                return Verdict.OUT_OF_LIMITS
        if response.isdigit():
            self.code = code = int(response)
        else:  # a program may have ended the first process
            self.end()
            code = self._process.returncode
        self._is_running = False
        self._empty_folder()
        if code == 0:
            return Verdict.PASSED
        is_killed = code < 0 or code in (LIMIT_EXIT_CODE, 128 + signal.SIGKILL)
        return Verdict.OUT_OF_LIMITS if is_killed else Verdict.FAILED

    def _receive(self, seconds: float) -> bytes | None:
        """Return the next response; None if none arrives in time, and nothing if none will."""
        if not select.select([self._control], [], [], seconds)[0]:
            return None
        try:
            return self._control.recv(MAX_RESPONSE_BYTES)
        except ConnectionError:
            return b""

    def _is_empty(self) -> bool:
        return not any(self.folder.iterdir())

    def _empty_folder(self) -> None:
        """Delete what a program has left; what can't be deleted makes this runner unusable."""
        with contextlib.suppress(OSError):
            self.folder.chmod(0o700)
            for path in self.folder.iterdir():
                if path.is_dir() and not path.is_symlink():
                    _delete_tree(path)
                else:
                    path.unlink()

    def _exceeds_limits(self) -> bool:
        """Return whether the program's process tree exceeds the limits."""
        processes = self._descendants()
        memory, count = 0, 0
        for process in processes:
            with contextlib.suppress(psutil.Error):
                memory += process.memory_info().rss
                count += 1
        if (
            memory > self._limits.memory_bytes + count * SHARED_BYTES
            or count > MAX_PROCESSES + WRAPPER_PROCESSES
        ):
            return True
        return not self._isolation.has_own_files and exceeds_file_limits(
            self.folder,
            processes,
            max_bytes=MAX_FOLDER_BYTES,
            max_files=MAX_FILES,
            user=self._isolation.user,
            may_hide=self._isolation.has_private_root,
        )

    def _descendants(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.Error):
            return list(psutil.Process(self._process.pid).children(recursive=True))
        return []

    def close(self) -> None:
        """End the first process after its last program."""
        self._control.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        self.end()

    def end(self) -> None:
        """End the program, all processes that it started, and the first process; delete what they
        left.
        """
        self._control.close()
        if self._process.poll() is None:  # the first process inside ends last
            self._end_processes()
        self._empty_folder()

    def _end_processes(self) -> None:
        left = self._descendants()
        if not self._isolation.has_namespaces:
            self._process.terminate()  # it ends its descendants, and then itself
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_SECONDS)
        self._process.kill()
        self._process.wait()
        deadline = time.monotonic() + END_SECONDS
        while (
            left := [process for process in left if _is_alive(process)]
        ) and time.monotonic() < deadline:
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            time.sleep(KILL_POLL_SECONDS)

    def _resource_limits(self) -> dict[str, int]:
        has_own_files = self._isolation.has_own_files
        return {
            "RLIMIT_AS": self._limits.memory_bytes,
            "RLIMIT_CPU": math.ceil(self._limits.seconds) + 1,
            "RLIMIT_FSIZE": MAX_FILE_BYTES if has_own_files else MAX_COUNTED_FILE_BYTES,
            "RLIMIT_NOFILE": MAX_OPEN_FILES,
            "RLIMIT_CORE": 0,
        }


def _is_alive(process: psutil.Process) -> bool:
    """Return whether a process is alive; a zombie is not."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _delete_tree(folder: Path) -> None:
    """Delete a folder, also one that a program made unreadable, or deeper than Python can walk."""
    try:
        shutil.rmtree(folder)
    except (OSError, RecursionError):
        for command in (["chmod", "--recursive", "u+rwx"], ["rm", "--recursive", "--force"]):
            subprocess.run([*command, "--", str(folder)], capture_output=True, check=False)
