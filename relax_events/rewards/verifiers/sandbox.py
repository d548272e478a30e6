"""Runs a program that nobody has looked at: in processes of its own, with limits, without network, in a folder that is deleted."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import IO

import orjson
import psutil

from relax_events.errors import EnvironmentProblem, RewardError
from relax_events.rewards.verifiers import sandbox_program
from relax_events.rewards.verifiers.sandbox_program import LIMIT_EXIT_CODE

MAX_PROCESSES = 32
MAX_OPEN_FILES = 64
MAX_FILE_BYTES = 16 * 1024**2
PROBE_SECONDS = 20.0
SETUP_SECONDS = 30.0
END_SECONDS = 5.0
FIRST_SPARE_USER, NUM_SPARE_USERS = 61_000, 4_000
NAMESPACES = ("--net", "--pid", "--ipc", "--fork", "--kill-child")


class Verdict(StrEnum):
    """What came of a program."""

    PASSED = "passed"
    FAILED = "failed"
    OUT_OF_LIMITS = "out_of_limits"


@dataclass(frozen=True, slots=True)
class Limits:
    """What one run of a program may take."""

    seconds: float = 4.0
    memory_bytes: int = 512 * 1024**2


@dataclass(frozen=True, slots=True)
class Walls:
    """What stands between the program and this machine: a command that leads into namespaces and to another user, as far as possible."""

    command: tuple[str, ...]
    has_namespaces: bool
    user: int | None


class Sandbox:
    """A solution in a temporary folder, to be run several times. Use it as a context manager."""

    def __init__(self, solution: str, limits: Limits) -> None:
        self._limits, self._walls = limits, find_walls()
        self._folder = Path(tempfile.mkdtemp(prefix="relax-sandbox-"))
        self._solution = self._folder / "solution.py"
        self._solution.write_text(solution, errors="replace")
        if self._walls.user is not None:
            os.chown(self._folder, self._walls.user, self._walls.user)

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def run_with_input(self, given: str) -> tuple[Verdict, str]:
        """Run the solution with a text on its stdin; return what came of it and what it wrote to stdout."""
        with self._file(given.encode(errors="replace")) as stdin, self._file() as stdout:
            verdict = self._run(stdin, stdout, has_tests=False)
            stdout.seek(0)
            return verdict, stdout.read(MAX_FILE_BYTES).decode(errors="replace")

    def run_with_tests(self, tests: str) -> Verdict:
        """Run the solution, then a program of tests that sees what it defined; it passes unless something is raised."""
        word = secrets.token_hex(16)
        with self._file(orjson.dumps({"tests": tests, "word": word})) as stdin, self._file() as stdout:
            verdict = self._run(stdin, stdout, has_tests=True)
            stdout.seek(0)
            said_so = stdout.read(len(word)) == word.encode()
        return Verdict.FAILED if verdict is Verdict.PASSED and not said_so else verdict

    def _run(self, stdin: IO[bytes], stdout: IO[bytes], *, has_tests: bool) -> Verdict:
        alive, held_open = os.pipe()  # whatever the program starts inherits one end
        setup = {"limits": self._resource_limits(), "solution": str(self._solution), "has_tests": has_tests, "alive": held_open}
        command = [*self._walls.command, sys.executable, "-I", "-B", str(sandbox_program.__file__), orjson.dumps(setup).decode()]
        process = subprocess.Popen(
            command,
            stdin=stdin,
            stdout=stdout,
            stderr=subprocess.DEVNULL,
            cwd=self._folder,
            env={"PATH": "/usr/bin:/bin", "HOME": str(self._folder), "TMPDIR": str(self._folder), "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"},
            # Namespaces end with their first process. Without them a session of its own is the best hold on what a program starts.
            start_new_session=not self._walls.has_namespaces,
            pass_fds=(held_open,),
        )
        os.close(held_open)
        try:
            self._await_begin(process, alive)
            code = self._wait(process, alive)
        finally:
            self._end(process)
            os.close(alive)
        if code == 0:
            return Verdict.PASSED
        return Verdict.OUT_OF_LIMITS if code is None or code < 0 or code == LIMIT_EXIT_CODE else Verdict.FAILED

    def _await_begin(self, process: subprocess.Popen[bytes], alive: int) -> None:
        """Wait until the limits are in place; a program that would begin later finds the pipe closed, and ends.

        Raises:
            RewardError: They did not come to be.
        """
        ready, _, _ = select.select([alive], [], [], SETUP_SECONDS)
        if not ready or not os.read(alive, 1):
            raise RewardError(f"the sandbox could not be set up within {SETUP_SECONDS:g} s (exit code {process.poll()})")

    def _wait(self, process: subprocess.Popen[bytes], alive: int) -> int | None:
        """Return the exit code, or None when time was up, once nothing is left that the program started."""
        try:
            return process.wait(self._limits.seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            self._end(process)
            select.select([alive], [], [], END_SECONDS)

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """Kill the program with all that it started."""
        if not self._walls.has_namespaces:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.wait()

    def _resource_limits(self) -> dict[str, int]:
        return {
            "RLIMIT_AS": self._limits.memory_bytes,
            "RLIMIT_CPU": math.ceil(self._limits.seconds) + 1,
            "RLIMIT_FSIZE": MAX_FILE_BYTES,
            "RLIMIT_NOFILE": MAX_OPEN_FILES,
            "RLIMIT_NPROC": MAX_PROCESSES + self._num_other_processes(),
            "RLIMIT_CORE": 0,
        }

    def _num_other_processes(self) -> int:
        """Return how many processes the system will count besides the program's own."""
        if self._walls.has_namespaces or self._walls.user is not None:
            return 0
        mine = [
            process for process in psutil.process_iter(["uids", "num_threads"]) if process.info["uids"] and process.info["uids"].real == os.getuid()
        ]
        return sum(process.info["num_threads"] or 1 for process in mine)

    def _file(self, content: bytes = b"") -> IO[bytes]:
        file = tempfile.TemporaryFile()  # noqa: SIM115 closed by who asked for it
        file.write(content)
        file.seek(0)
        return file


@cache
def find_walls() -> Walls:
    """Return the strongest walls that this machine lets us build, by trying them.

    Raises:
        EnvironmentProblem: Not even processes can be kept from multiplying: we are root and cannot become another user.
    """
    is_root = os.geteuid() == 0
    user = FIRST_SPARE_USER + os.getpid() % NUM_SPARE_USERS if is_root else None
    inside = ("unshare", *(() if is_root else ("--user", "--map-current-user")), *NAMESPACES)
    # With a /proc of its own a program cannot read its judge's environment; some containers refuse to mount one.
    for namespaces in ((*inside, "--mount-proc"), inside, ()):
        for become in _ways_to_become(user):
            if _leads_to_python((*namespaces, *become)):
                return Walls((*namespaces, *become), bool(namespaces), user)
    raise EnvironmentProblem("as root, programs can only be judged as another user, and setpriv failed; run the worker as an ordinary user")


def _ways_to_become(user: int | None) -> list[tuple[str, ...]]:
    if user is None:
        return [()]
    become = ("setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "--no-new-privs")
    # The second way is for a Python that lies in root's own folders: the program may read, but not write, what root may.
    return [(*become, "--inh-caps=-all"), (*become, "--inh-caps=-all,+dac_read_search", "--ambient-caps=-all,+dac_read_search")]


def _leads_to_python(command: tuple[str, ...]) -> bool:
    try:
        probe = subprocess.run([*command, sys.executable, "-I", "-c", "import json"], capture_output=True, timeout=PROBE_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return probe.returncode == 0
