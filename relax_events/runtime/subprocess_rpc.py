"""A child process that answers requests one at a time: one that hangs, grows or crashes costs
its question, and never the worker.

A question is a line of JSON and bytes behind it, whose lengths stand in the line; so is the answer.
The child ends as soon as its stdin does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

import orjson

from relax_events.runtime.child_environment import build_child_environment

LENGTHS = "num_bytes"
"""Key of a line under which the lengths stand."""
FAILURE = "failure"
"""Key of a child's last answer: what it did not foresee, before it ends."""
EXIT_SECONDS = 1.0
"""In which a child that answers no more has ended, and its own code or signal is known."""


@dataclass(frozen=True, slots=True)
class ChildProcessLost(Exception):
    """The child is gone: it was ended because it was late, or ended by itself."""

    is_late: bool
    ending: str


class SubprocessRpc:
    """The parent's side. It ends with this process, and with its owner. Used by one thread at a
    time.
    """

    def __init__(self, module: str, *, setup: Mapping[str, Any], is_confined: bool = False) -> None:
        """Start the process, without the worker's credentials and other secrets.

        Args:
            module: What it runs; it answers by `read_requests` and `respond`.
            setup: The first message that it gets.
            is_confined: Whether it gets by without files, network and processes of its own: then it
                is kept from them.
        """
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                *(["relax_events.sandbox.confined"] if is_confined else []),
                module,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env=build_child_environment(),
        )
        self._finalizer = weakref.finalize(self, _end, self._process)
        assert self._process.stdin is not None
        self._process.stdin.write(orjson.dumps(setup) + b"\n")

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def request(
        self, question: Mapping[str, Any], contents: Sequence[bytes] = (), *, seconds: float
    ) -> tuple[dict[str, Any], bytes]:
        """Ask, and wait for the answer.

        Args:
            question: JSON.
            contents: What goes behind it.
            seconds: For all of it.
        Returns:
            The answer, and the bytes behind it.
        Raises:
            ChildProcessLost: There is none within the time, or the child is gone; there is nothing
                to be had from it any more.
        """
        late = threading.Event()
        watch = threading.Timer(seconds, _give_up, [self._process, late])
        watch.start()
        try:
            answer = self._exchanged(b"".join(_message(question, contents)))
        finally:
            watch.cancel()
        if answer is None or FAILURE in answer[0]:
            failure = "" if answer is None else f"{answer[0][FAILURE]}; "
            raise ChildProcessLost(late.is_set(), failure + self.close(exit_seconds=EXIT_SECONDS))
        return answer

    def close(self, *, exit_seconds: float = 0.0) -> str:
        """End the process, whatever it does; say how it ended.

        Args:
            exit_seconds: In which it may end by itself, so that its own code or signal is
                reported and not that of being killed.
        """
        self._finalizer.detach()
        if exit_seconds:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(exit_seconds)
        code = _end(self._process)
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def _exchanged(self, message: bytes) -> tuple[dict[str, Any], bytes] | None:
        """Send a question and read its answer; None where the child is gone before it is whole."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(message)
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError):  # ValueError: the pipe was closed by `close`
            return None
        return _read(self._process.stdout)


def read_requests(requests: IO[bytes]) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Give the questions that a child is asked, until there are no more; for the child's side."""
    while (question := _read(requests)) is not None:
        yield question


@contextlib.contextmanager
def raise_failures(answers: IO[bytes]) -> Iterator[None]:
    """Answer an unexpected error by its name and text, before the child ends of it; for
    the child's side.
    """
    try:
        yield
    except Exception as error:
        respond(answers, {FAILURE: f"{type(error).__name__}: {error}"})
        raise


def respond(
    answers: IO[bytes], said: Mapping[str, Any], contents: Sequence[bytes | memoryview] = ()
) -> None:
    """Answer a question; for the child's side."""
    answers.writelines(_message(said, contents))
    answers.flush()


def _message(
    line: Mapping[str, Any], contents: Sequence[bytes | memoryview]
) -> Iterable[bytes | memoryview]:
    yield (
        orjson.dumps(
            {
                **line,
                LENGTHS: [
                    len(content) if isinstance(content, bytes) else content.nbytes
                    for content in contents
                ],
            }
        )
        + b"\n"
    )
    yield from contents


def _read(stream: IO[bytes]) -> tuple[dict[str, Any], bytes] | None:
    """Read a whole message; None where the stream ends before."""
    try:
        if not (line := stream.readline()).endswith(b"\n"):
            return None
        head: dict[str, Any] = orjson.loads(line)
        content = stream.read(wanted := sum(head[LENGTHS]))
    except ValueError:  # the pipe was closed by `close`
        return None
    return (head, content) if len(content) == wanted else None


def _give_up(process: subprocess.Popen[bytes], late: threading.Event) -> None:
    late.set()
    _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the child and what it has started; its number stays its own until it was waited for."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


def _end(process: subprocess.Popen[bytes]) -> int:
    _kill(process)
    for pipe in (process.stdin, process.stdout):
        try:
            if pipe is not None:
                pipe.close()
        except BrokenPipeError:  # bytes that were still to be sent
            continue
    return process.wait()
