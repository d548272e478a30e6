"""Runs a solution in a sandbox: with an input, or against tests that run apart from it."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import IO

from relax_events.sandbox.isolation import Isolation
from relax_events.sandbox.runner import MAX_FILE_BYTES, Limits, Runner, Verdict

SOLUTION_EXIT_SECONDS = 0.5
SOLUTION_GONE_EXIT_CODE = 78
MAX_VERDICT_BYTES = 4096
READABLE = 0o644
"""The mode of files that another user's program must read, whatever our umask is."""


class Sandbox:
    """A solution in a temporary folder, which can be run several times. Use it as a context
    manager.

    The isolation is set up once, and each run has processes of its own in it: what one run leaves
    is ended and deleted before the next. Only an isolation that had to be ended is set up again.

    Attributes:
        reason: Why the last tests failed, as their process said; may contain text of the solution.
    """

    def __init__(self, solution: str, limits: Limits, *, isolation: Isolation) -> None:
        """Write the solution into a temporary folder; nothing runs yet.

        Args:
            solution: Python source.
            limits: The limits of each run.
            isolation: The isolation, as `require_isolation` returns it.
        """
        self.reason = ""
        self._limits, self._isolation = limits, isolation
        self._folder = Path(tempfile.mkdtemp(prefix="relax-sandbox-"))
        self._folder.chmod(0o711)  # the program's user must reach the folder of its run
        self._solution = self._folder / "solution.py"
        self._solution.write_text(solution, errors="replace")
        self._solution.chmod(READABLE)
        self._runners: dict[str, Runner] = {}
        self._numbers = itertools.count()

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        for runner in self._runners.values():
            runner.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def run_with_input(self, stdin_text: str) -> tuple[Verdict, str]:
        """Run the solution with a text on stdin; return its verdict and its stdout."""
        with (
            _open_temporary_file(stdin_text.encode(errors="replace")) as stdin,
            _open_temporary_file() as stdout,
        ):
            (runner,) = self._prepare("run")
            runner.start(
                {"program": self._copy_solution(runner)},
                {"stdin": stdin.fileno(), "stdout": stdout.fileno()},
            )
            verdict = runner.finish(time.monotonic() + self._limits.seconds)
            stdout.seek(0)
            return verdict, stdout.read(MAX_FILE_BYTES).decode(errors="replace")

    def run_with_tests(self, tests: str) -> Verdict:
        """Run tests against the solution's definitions; they pass unless they raise an exception.

        The tests run in a sandbox of their own. The solution receives the arguments of calls and
        returns results: it sees neither the tests nor the expected values, and it does not decide
        the verdict.
        """
        solution_runner, test_runner = self._prepare("solution", "tests")
        with contextlib.ExitStack() as stack:
            verdict_pipe = _Pipe(stack)
            self._start_both(solution_runner, test_runner, tests, verdict_pipe, stack)
            deadline = time.monotonic() + self._limits.seconds
            tests_verdict = test_runner.finish(deadline)
            verdict_bytes = verdict_pipe.read.read(MAX_VERDICT_BYTES) or b""
            self.reason = verdict_bytes[1:].decode(errors="replace")
            is_gone = test_runner.code == SOLUTION_GONE_EXIT_CODE
            solution_verdict = solution_runner.finish(
                deadline if is_gone else time.monotonic() + SOLUTION_EXIT_SECONDS
            )  # it exits by itself after the tests
        if verdict_bytes == b"1":
            return Verdict.PASSED
        verdict = solution_verdict if is_gone else tests_verdict
        return Verdict.FAILED if verdict is Verdict.PASSED else verdict

    def _start_both(
        self,
        solution_runner: Runner,
        test_runner: Runner,
        tests: str,
        verdict_pipe: _Pipe,
        stack: contextlib.ExitStack,
    ) -> None:
        to_solution, to_tests = _Pipe(stack), _Pipe(stack)
        solution_runner.start(
            {"serve": self._copy_solution(solution_runner)},
            {"stdin": to_solution.read.fileno(), "stdout": to_tests.write.fileno()},
        )
        file = test_runner.folder / "tests.py"
        file.write_text(tests, errors="replace")
        file.chmod(READABLE)
        test_runner.start(
            {"tests": str(file)},
            {
                "requests": to_tests.read.fileno(),
                "answers": to_solution.write.fileno(),
                "verdict": verdict_pipe.write.fileno(),
            },
        )
        for end in (
            to_solution.read,
            to_solution.write,
            to_tests.read,
            to_tests.write,
            verdict_pipe.write,
        ):
            end.close()  # otherwise a reader would not see that the writing process exited

    def _prepare(self, *names: str) -> list[Runner]:
        """Return a runner for each name: an earlier run's if it can still be used."""
        for name in names:
            runner = self._runners.get(name)
            if runner is not None and not runner.is_usable:
                runner.end()
                del self._runners[name]
            if name not in self._runners:
                folder = self._folder / f"{name}-{next(self._numbers)}"
                self._runners[name] = Runner(self._isolation, self._limits, folder)
        return [self._runners[name] for name in names]

    def _copy_solution(self, runner: Runner) -> str:
        return str(shutil.copy(self._solution, runner.folder / "solution.py"))


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
