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
SOLUTION_EXIT_SECONDS = 0.5
KILL_POLL_SECONDS = 0.005
FIRST_CHECK_SECONDS = 0.1
CHECK_SECONDS = 0.05
WRAPPER_PROCESSES = 3
"""The processes that start the program."""
SHARED_BYTES = 16 * 1024**2
"""The interpreter's memory, which is counted for each process although it is shared."""
SOLUTION_GONE_EXIT_CODE = 78
READABLE = 0o644
"""The mode of files that another user's program must read, whatever our umask is."""


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

    def __init__(
        self, solution: str, limits: Limits, *, isolation: Isolation | None = None
    ) -> None:
        """Write the solution into a temporary folder; nothing runs yet.

        Args:
            solution: Python source.
            limits: The limits of each run.
            isolation: The isolation; by default the strongest of this machine.
        Raises:
            EnvironmentProblem: This machine has no sufficient isolation.
        """
        self._limits, self._isolation = limits, isolation or require_isolation()
        self._folder = Path(tempfile.mkdtemp(prefix="relax-sandbox-"))
        self._folder.chmod(0o711)  # the program's user must reach the folder of its run
        self._solution = self._folder / "solution.py"
        self._solution.write_text(solution, errors="replace")
        self._solution.chmod(READABLE)

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def run_with_input(self, stdin_text: str) -> tuple[Verdict, str]:
        """Run the solution with a text on stdin; return its verdict and its stdout."""
        with (
            _open_temporary_file(stdin_text.encode(errors="replace")) as stdin,
            _open_temporary_file() as stdout,
            self._run_folder("run") as folder,
        ):
            process = _Process(
                self._isolation,
                self._limits,
                folder,
                {"program": self._copy_solution(folder)},
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
            solution_folder, tests_folder = (
                stack.enter_context(self._run_folder("solution")),
                stack.enter_context(self._run_folder("tests")),
            )
            (tests_folder / "tests.py").write_text(tests, errors="replace")
            (tests_folder / "tests.py").chmod(READABLE)
            to_solution, to_tests, verdict_pipe = _Pipe(stack), _Pipe(stack), _Pipe(stack)
            solution_task = {"serve": self._copy_solution(solution_folder)}
            solution_process = _Process(
                self._isolation,
                self._limits,
                solution_folder,
                solution_task,
                stdin=to_solution.read.fileno(),
                stdout=to_tests.write.fileno(),
            )
            stack.callback(solution_process.end)
            test_fds = (
                to_tests.read.fileno(),
                to_solution.write.fileno(),
                verdict_pipe.write.fileno(),
            )
            test_task = {
                "tests": str(tests_folder / "tests.py"),
                **dict(zip(("requests", "answers", "verdict"), test_fds, strict=True)),
            }
            test_process = _Process(
                self._isolation, self._limits, tests_folder, test_task, pass_fds=test_fds
            )
            for end in (
                to_solution.read,
                to_solution.write,
                to_tests.read,
                to_tests.write,
                verdict_pipe.write,
            ):
                end.close()  # otherwise a reader would not see that the writing process exited
            deadline = time.monotonic() + self._limits.seconds
            tests_verdict = test_process.finish(deadline)
            has_passed = verdict_pipe.read.read(1) == b"1"
            is_gone = test_process.code == SOLUTION_GONE_EXIT_CODE
            solution_verdict = solution_process.finish(
                deadline if is_gone else time.monotonic() + SOLUTION_EXIT_SECONDS
            )  # it exits by itself after the tests
            if has_passed:
                return Verdict.PASSED
            verdict = solution_verdict if is_gone else tests_verdict
            return Verdict.FAILED if verdict is Verdict.PASSED else verdict

    @contextlib.contextmanager
    def _run_folder(self, name: str) -> Iterator[Path]:
        """Create a folder that one run may write to, and delete it afterwards."""
        folder = self._folder / name
        folder.mkdir()
        try:
            if self._isolation.user is not None:
                os.chown(folder, self._isolation.user, self._isolation.user)
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _copy_solution(self, folder: Path) -> str:
        return str(shutil.copy(self._solution, folder / "solution.py"))


class _Process:
    """One program in isolation."""

    def __init__(
        self,
        isolation: Isolation,
        limits: Limits,
        folder: Path,
        task: Mapping[str, object],
        *,
        stdin: int = subprocess.DEVNULL,
        stdout: int = subprocess.DEVNULL,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self._isolation, self._limits, self._folder = isolation, limits, folder
        self.code: int | None = None
        """The exit code, once the program has ended by itself."""
        started, ready = os.pipe()
        setup = build_setup(
            isolation,
            folder=folder,
            limits=self._resource_limits(),
            processes=MAX_PROCESSES,
            ready=ready,
            task=task,
        )
        prefix = (
            build_bubblewrap_command(isolation, folder=folder)
            if isolation.has_private_root
            else list(isolation.command)
        )
        try:
            self._process = subprocess.Popen(
                [*prefix, isolation.python, "-I", "-B", str(ENTRY), setup],
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

    def finish(self, deadline: float) -> Verdict:
        """Wait until the program ends, or end it at the deadline or when it exceeds the limits;
        return its verdict.

        Args:
            deadline: The deadline, on the monotonic clock.
        """
        try:
            return self._watch(deadline)
        finally:
            self.end()

    def _watch(self, deadline: float) -> Verdict:
        interval = FIRST_CHECK_SECONDS
        while True:
            try:
                self.code = code = self._process.wait(
                    max(0.0, min(interval, deadline - time.monotonic()))
                )
            except subprocess.TimeoutExpired:
                interval = CHECK_SECONDS
                if self._exceeds_limits() or time.monotonic() >= deadline:
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
    """A pipe whose ends are closed by the exit stack, if not before."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        read, write = os.pipe()
        self.read, self.write = (
            stack.enter_context(os.fdopen(read, "rb", 0)),
            stack.enter_context(os.fdopen(write, "wb", 0)),
        )
