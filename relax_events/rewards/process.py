"""Control one reward child process: its pipes, its pending requests, and a limit on what it
prints.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import IO, Any

import orjson

from relax_events.config import RewardConfig
from relax_events.errors import ConfigError
from relax_events.runtime.subprocess_rpc import build_child_environment

MAX_LINE_BYTES = 4_000
BURST_BYTES = 262_144
BYTES_PER_SECOND = 1_024.0
"""Sustained rate of printed text: 84 MiB a day."""


class PrintBudget:
    """Limits a stream of printed bytes: long lines are cut, and bytes beyond the budget are dropped
    and counted.
    """

    def __init__(self, *, now: float) -> None:
        """Begin with a full budget.

        Args:
            now: Seconds of a monotonic clock.
        """
        self._budget, self._at = float(BURST_BYTES), now
        self._line_bytes = 0
        self._num_dropped_bytes = 0

    def limit(self, data: bytes, *, now: float) -> bytes:
        """Return the part of the next bytes that may be written; a line that is cut ends in
        dots.
        """
        self._budget = min(BURST_BYTES, self._budget + (now - self._at) * BYTES_PER_SECOND)
        self._at = now
        shown = bytearray()
        for part in data.splitlines(keepends=True):
            shown += self._allowed(self._cut(part))
        return bytes(shown)

    def _cut(self, part: bytes) -> bytes:
        before, is_whole = self._line_bytes, part.endswith(b"\n")
        self._line_bytes = 0 if is_whole else before + len(part)
        room = MAX_LINE_BYTES - before
        if len(part) <= room:
            return part
        return (part[:room] + b"..." if room >= 0 and before <= MAX_LINE_BYTES else b"") + (
            b"\n" if is_whole else b""
        )

    def _allowed(self, part: bytes) -> bytes:
        if len(part) > self._budget:
            self._num_dropped_bytes += len(part)
            return b""
        self._budget -= len(part)
        if not self._num_dropped_bytes:
            return part
        note = f"({self._num_dropped_bytes} bytes printed by the reward function were dropped)\n"
        self._num_dropped_bytes = 0
        return note.encode() + part


START_SECONDS = 120.0
ASYNC_GRACE_SECONDS = 1.0
READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Request:
    """A waiting call: the indices of its results, and its line for the child.

    A request that `is_suspect` was in flight with others in a child that hung or died: it is
    retried alone to find the cause.
    """

    indices: tuple[int, ...]
    line: bytes
    is_suspect: bool = False


@dataclass(frozen=True, slots=True)
class ChildReady:
    """The first message of a child that has loaded the function; `files` are stamps of the files in
    its version.
    """

    digest: str
    takes_prompt_group: bool
    is_async: bool
    optional_arguments: list[str]
    files: dict[str, list[int]]


class RewardChild:
    """A child process that responds to requests in order, one at a time or, for an `async def`,
    several.

    The timeout of a request starts when it becomes the oldest one, so requests behind a slow call
    don't time out.
    """

    def __init__(self, config: RewardConfig) -> None:
        """Start the process; it can be used once `ready` is set."""
        self._config = config
        self._process = subprocess.Popen(
            [sys.executable, "-m", "relax_events.rewards.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            env=build_child_environment(config.variables),
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self.stdin, self.stdout = self._process.stdin, self._process.stdout
        threading.Thread(
            target=_forward_prints, args=(self._process.stderr,), name="reward-prints", daemon=True
        ).start()
        os.set_blocking(self.stdin.fileno(), False)
        self.ready: ChildReady | None = None
        self.requests: deque[Request] = deque()
        self.num_answered = 0
        self._outgoing = bytearray(orjson.dumps(config.model_dump(exclude={"processes"})) + b"\n")
        self._incoming = b""
        self._clock = time.monotonic()
        self.write()

    @property
    def deadline(self) -> float | None:
        """Monotonic time by which the child must respond; None without pending requests."""
        if self.ready is None:
            return self._clock + START_SECONDS
        # A child with several calls in flight enforces their timeouts itself; it is killed if it
        # can't.
        grace = ASYNC_GRACE_SECONDS if self.ready.is_async else 0.0
        return self._clock + self._config.timeout_seconds + grace if self.requests else None

    @property
    def is_isolating_suspect(self) -> bool:
        """Whether it runs a suspect request, which must run alone."""
        return bool(self.requests) and self.requests[0].is_suspect

    @property
    def has_outgoing(self) -> bool:
        """Whether requests wait for room in the pipe."""
        return bool(self._outgoing)

    def send(self, requests: list[Request]) -> None:
        """Queue requests and write as many as the pipe accepts."""
        if not self.requests:
            self._clock = time.monotonic()
        self.requests.extend(requests)
        self._outgoing += b"".join(request.line for request in requests)
        self.write()

    def write(self) -> None:
        """Write as much as the pipe accepts; a dead child is detected when its responses are
        read.
        """
        try:
            while self._outgoing:
                with memoryview(self._outgoing) as view:
                    num_bytes = os.write(self.stdin.fileno(), view)
                del self._outgoing[:num_bytes]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._outgoing.clear()

    def read(self) -> list[tuple[Request, dict[str, Any]]] | None:
        """Read the responses that have arrived, oldest first; None if the child is gone.

        Raises:
            ConfigError: The child could not load the function.
        """
        data = os.read(self.stdout.fileno(), READ_BYTES)
        if not data:
            return None
        *lines, self._incoming = (self._incoming + data).split(b"\n")
        answers = [orjson.loads(line) for line in lines]
        if answers:
            self._clock = time.monotonic()
        if answers and self.ready is None:
            self._handle_ready(answers.pop(0))
        return [(self.requests.popleft(), answer) for answer in answers]

    def _handle_ready(self, ready: dict[str, Any]) -> None:
        if "load_error" in ready:
            raise ConfigError(ready["load_error"])
        self.ready = ChildReady(**ready)

    def kill(self) -> str:
        """Kill the process and its descendants, and return how it ended."""
        if self._process.poll() is None:
            self.signal(signal.SIGKILL)
        code = self._process.wait()
        self.signal(signal.SIGKILL)  # processes that a dead child left in its process group
        self.stdin.close()
        self.stdout.close()
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def close(self, *, timeout_seconds: float) -> None:
        """End the process: close its stdin so that it exits, and kill it if it does not."""
        self.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_seconds)
        self.kill()

    def signal(self, number: int) -> None:
        """Send a signal to the process and its descendants."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def _forward_prints(printed: IO[bytes]) -> None:
    """Forward the child's prints to our stderr within the budget, until the child and its
    descendants have exited.
    """
    budget = PrintBudget(now=time.monotonic())
    with printed:
        while data := os.read(printed.fileno(), READ_BYTES):
            if shown := budget.limit(data, now=time.monotonic()):
                sys.stderr.write(shown.decode(errors="replace"))
                sys.stderr.flush()
