"""Runs a solution in a sandbox, with limits on time, and on memory, processes and files of its
whole process tree.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import IO

import psutil

from relax_events.errors import RewardError
from relax_events.sandbox.inside.entry import LIMIT_EXIT_CODE
from relax_events.sandbox.isolation import (
    ENTRY,
    Isolation,
    build_bubblewrap_command,
    build_setup,
    require_isolation,
)

MAX_PROCESSES = 32
MAX_OPEN_FILES = 64
MAX_FILE_BYTES = 16 * 1024**2
MAX_FOLDER_BYTES = 64 * 1024**2
SETUP_SECONDS = 30.0
END_SECONDS = 5.0
LEAVE_SECONDS = 0.5
KILL_POLL_SECONDS = 0.005
FIRST_CHECK_SECONDS = 0.1
CHECK_SECONDS = 0.05
WRAPPER_PROCESSES = 3
"""The processes that start the program."""
SHARED_BYTES = 16 * 1024**2
"""The interpreter's memory, which is counted for each process although it is shared."""
SOLUTION_GONE_EXIT_CODE = 78
READABLE = 0o644
"""The mode of files that a program of another user must read, independent of our umask."""


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


class Sandbox:
    """A solution in a temporary folder, which can be run several times. Use it as a context
    manager.
    """

    def __init__(self, solution: str, limits: Limits, *, walls: Isolation | None = None) -> None:
        """Write the solution into a temporary folder; nothing runs yet.

        Args:
            solution: Python source.
            limits: The limits of each run.
            walls: The isolation; by default the strongest of this machine.
        Raises:
            EnvironmentProblem: This machine has no sufficient isolation.
        """
        self._limits, self._walls = limits, walls or require_isolation()
        self._folder = Path(tempfile.mkdtemp(prefix="relax-sandbox-"))
        self._folder.chmod(0o711)  # the program's user must reach the folder of its run
        self._solution = self._folder / "solution.py"
        self._solution.write_text(solution, errors="replace")
        self._solution.chmod(READABLE)

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def run_with_input(self, given: str) -> tuple[Verdict, str]:
        """Run the solution with a text on stdin; return its verdict and its stdout."""
        with (
            _open_temporary_file(given.encode(errors="replace")) as stdin,
            _open_temporary_file() as stdout,
            self._box("run") as folder,
        ):
            process = _Process(
                self._walls,
                self._limits,
                folder,
                {"program": self._copy(folder)},
                stdin=stdin.fileno(),
                stdout=stdout.fileno(),
            )
            verdict = process.finish(time.monotonic() + self._limits.seconds)
            stdout.seek(0)
            return verdict, stdout.read(MAX_FILE_BYTES).decode(errors="replace")

    def run_with_tests(self, tests: str) -> Verdict:
        """Run tests against the solution's definitions; they pass unless they raise an exception.

        The tests run in a sandbox of their own. The solution receives the arguments of calls and
        returns results: it sees neither the tests nor the expected values, and it does not decide
        the verdict.
        """
        with contextlib.ExitStack() as stack:
            box, court = (
                stack.enter_context(self._box("solution")),
                stack.enter_context(self._box("tests")),
            )
            (court / "tests.py").write_text(tests, errors="replace")
            (court / "tests.py").chmod(READABLE)
            to_solution, to_judge, to_us = _Pipe(stack), _Pipe(stack), _Pipe(stack)
            served = {"serve": self._copy(box)}
            solution = _Process(
                self._walls,
                self._limits,
                box,
                served,
                stdin=to_solution.read.fileno(),
                stdout=to_judge.write.fileno(),
            )
            stack.callback(solution.end)
            ends = (to_judge.read.fileno(), to_solution.write.fileno(), to_us.write.fileno())
            judged = {
                "judge": str(court / "tests.py"),
                **dict(zip(("requests", "answers", "verdict"), ends, strict=True)),
            }
            judge = _Process(self._walls, self._limits, court, judged, pass_fds=ends)
            for end in (
                to_solution.read,
                to_solution.write,
                to_judge.read,
                to_judge.write,
                to_us.write,
            ):
                end.close()  # so that a reader sees the end of a process
            until = time.monotonic() + self._limits.seconds
            decided = judge.finish(until)
            has_passed = to_us.read.read(1) == b"1"
            is_gone = judge.code == SOLUTION_GONE_EXIT_CODE
            ending = solution.finish(
                until if is_gone else time.monotonic() + LEAVE_SECONDS
            )  # it ends by itself once the tests have ended
            if has_passed:
                return Verdict.PASSED
            decided = ending if is_gone else decided
            return Verdict.FAILED if decided is Verdict.PASSED else decided

    @contextlib.contextmanager
    def _box(self, name: str) -> Iterator[Path]:
        """Create a folder that one run may write to, and delete it afterwards."""
        folder = self._folder / name
        folder.mkdir()
        try:
            if self._walls.user is not None:
                os.chown(folder, self._walls.user, self._walls.user)
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _copy(self, folder: Path) -> str:
        return str(shutil.copy(self._solution, folder / "solution.py"))


class _Process:
    """One program in isolation."""

    def __init__(
        self,
        walls: Isolation,
        limits: Limits,
        folder: Path,
        task: Mapping[str, object],
        *,
        stdin: int = subprocess.DEVNULL,
        stdout: int = subprocess.DEVNULL,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self._walls, self._limits, self._folder = walls, limits, folder
        self.code: int | None = None
        """The exit code, once the program has ended by itself."""
        started, ready = os.pipe()
        setup = build_setup(
            walls,
            folder=folder,
            limits=self._resource_limits(),
            processes=MAX_PROCESSES,
            ready=ready,
            task=task,
        )
        leading = (
            build_bubblewrap_command(walls, folder=folder)
            if walls.has_private_root
            else list(walls.command)
        )
        try:
            self._process = subprocess.Popen(
                [*leading, walls.python, "-I", "-B", str(ENTRY), setup],
                stdin=stdin,
                stdout=stdout,
                stderr=subprocess.DEVNULL,
                cwd=folder,
                env={
                    "PATH": "/usr/bin:/bin",
                    "HOME": str(folder),
                    "TMPDIR": str(folder),
                    "LANG": "C.UTF-8",
                    "OMP_NUM_THREADS": "1",
                },
                pass_fds=(ready, *pass_fds),
            )
        finally:
            os.close(ready)
        try:
            self._await_setup(started)
        finally:
            os.close(started)

    def _await_setup(self, started: int) -> None:
        readable, _, _ = select.select([started], [], [], SETUP_SECONDS)
        if not readable or not os.read(started, 1):
            self.end()
            raise RewardError(
                f"the sandbox could not be set up within {SETUP_SECONDS:g} s (exit code "
                f"{self._process.returncode})"
            )

    def finish(self, until: float) -> Verdict:
        """Wait for the program's end, and end it at the deadline or when it exceeds the limits;
        return its verdict.

        Args:
            until: The deadline on the monotonic clock.
        """
        try:
            return self._watch(until)
        finally:
            self.end()

    def _watch(self, until: float) -> Verdict:
        look = FIRST_CHECK_SECONDS
        while True:
            try:
                self.code = code = self._process.wait(max(0.0, min(look, until - time.monotonic())))
            except subprocess.TimeoutExpired:
                look = CHECK_SECONDS
                if self._exceeds_limits() or time.monotonic() >= until:
                    return Verdict.OUT_OF_LIMITS
            else:
                if code == 0:
                    return Verdict.PASSED
                return (
                    Verdict.OUT_OF_LIMITS
                    if code < 0 or code in (LIMIT_EXIT_CODE, 128 + signal.SIGKILL)
                    else Verdict.FAILED
                )

    def _exceeds_limits(self) -> bool:
        """Return whether the program's process tree exceeds the limits."""
        memory, count = 0, 0
        for process in self._descendants():
            with contextlib.suppress(psutil.Error):
                memory += process.memory_info().rss
                count += 1
        if (
            memory > self._limits.memory_bytes + count * SHARED_BYTES
            or count > MAX_PROCESSES + WRAPPER_PROCESSES
        ):
            return True
        return _measure_folder(self._folder) > MAX_FOLDER_BYTES

    def _descendants(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.Error):
            return list(psutil.Process(self._process.pid).children(recursive=True))
        return []

    def end(self) -> None:
        """End the program and all processes that it started."""
        if self._process.poll() is not None:
            return  # the first process inside ends last
        left = self._descendants()
        if not self._walls.has_namespaces:
            self._process.terminate()  # it ends its descendants, and then itself
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_SECONDS)
        self._process.kill()
        self._process.wait()
        until = time.monotonic() + END_SECONDS
        while (
            left := [process for process in left if _is_alive(process)]
        ) and time.monotonic() < until:
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            time.sleep(KILL_POLL_SECONDS)

    def _resource_limits(self) -> dict[str, int]:
        return {
            "RLIMIT_AS": self._limits.memory_bytes,
            "RLIMIT_CPU": math.ceil(self._limits.seconds) + 1,
            "RLIMIT_FSIZE": MAX_FILE_BYTES,
            "RLIMIT_NOFILE": MAX_OPEN_FILES,
            "RLIMIT_CORE": 0,
        }


def _is_alive(process: psutil.Process) -> bool:
    """Return whether a process is alive; a zombie is not."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _measure_folder(folder: Path) -> int:
    total = 0
    for root, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(root, name)).st_blocks * 512  # noqa: PTH118 it may vanish at any moment
    return total


def _open_temporary_file(content: bytes = b"") -> IO[bytes]:
    file = tempfile.TemporaryFile()  # noqa: SIM115 closed by the caller
    file.write(content)
    file.seek(0)
    return file


class _Pipe:
    """A pipe whose ends are closed with the stack at the latest."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        read, write = os.pipe()
        self.read, self.write = (
            stack.enter_context(os.fdopen(read, "rb", 0)),
            stack.enter_context(os.fdopen(write, "wb", 0)),
        )
