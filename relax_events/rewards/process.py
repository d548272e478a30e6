"""Bounds what a reward function prints: it may print without end, and the log that takes it has a
disk.

One reward child seen from its parent: a process, two pipes that never block, what it prints, and
    the requests it still has to answer.
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
from relax_events.runtime.child_environment import child_environment

MAX_LINE_BYTES = 4_000
BURST_BYTES = 262_144
BYTES_PER_SECOND = 1_024.0
"""Of printed text, over a long time: 84 MiB a day."""


class PrintBudget:
    """Says what of a stream of printed bytes is written: lines are cut, and what exceeds the budget
    is counted in its place.
    """

    def __init__(self, *, now: float) -> None:
        """Begin with a full budget.

        Args:
            now: Seconds, by any clock that only grows.
        """
        self._budget, self._at = float(BURST_BYTES), now
        self._line_bytes = 0
        self._num_dropped_bytes = 0

    def limit(self, data: bytes, *, now: float) -> bytes:
        """Return what is written of the next bytes; a line that is cut ends in dots."""
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
        note, self._num_dropped_bytes = (
            f"({self._num_dropped_bytes} bytes that the reward function printed are left out)\n".encode(),
            0,
        )
        return note + part


START_SECONDS = 120.0
ASYNC_GRACE_SECONDS = 1.0
READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Request:
    """A call that waits for its turn: where its results belong, and its line for the child.

    One that `is_suspect` was under way, with others, in a child that hung or died: it is asked
    alone to find out which it was.
    """

    indices: tuple[int, ...]
    line: bytes
    is_suspect: bool = False


@dataclass(frozen=True, slots=True)
class ChildReady:
    """What a child says once it has loaded the function; `files` are those that its version is made
    of, as they were on the disk.
    """

    digest: str
    takes_prompt_group: bool
    is_async: bool
    optional_arguments: list[str]
    files: dict[str, list[int]]


class RewardChild:
    """A child process that answers requests in their order, one at a time or, for an `async def`,
    several.

    The clock of a request starts when it becomes the oldest one, so a queue behind a slow call is
    not blamed for it.
    """

    def __init__(self, config: RewardConfig) -> None:
        """Start the process; it is ready once it has a `greeting`."""
        self._config = config
        self._process = subprocess.Popen(
            [sys.executable, "-m", "relax_events.rewards.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            env=child_environment(config.variables),
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
        """When the child must have said something, on the monotonic clock; None when nothing is
        asked of it.
        """
        if self.ready is None:
            return self._clock + START_SECONDS
        # A child with several calls under way keeps their time itself; we end it when it does not
        # come to that.
        grace = ASYNC_GRACE_SECONDS if self.ready.is_async else 0.0
        return self._clock + self._config.timeout_seconds + grace if self.requests else None

    @property
    def is_isolating_suspect(self) -> bool:
        """Whether it was given a suspect, which must be alone."""
        return bool(self.requests) and self.requests[0].is_suspect

    @property
    def has_outgoing(self) -> bool:
        """Whether requests wait for room in the pipe."""
        return bool(self._outgoing)

    def send(self, requests: list[Request]) -> None:
        """Queue requests and write as many as the pipe takes."""
        if not self.requests:
            self._clock = time.monotonic()
        self.requests.extend(requests)
        self._outgoing += b"".join(request.line for request in requests)
        self.write()

    def write(self) -> None:
        """Write as much as the pipe takes; a child that died is noticed when its answers are
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
        """Read the answers that have arrived, oldest first; None when the child is gone.

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

    def _handle_ready(self, greeting: dict[str, Any]) -> None:
        if "load_error" in greeting:
            raise ConfigError(greeting["load_error"])
        self.ready = ChildReady(**greeting)

    def kill(self) -> str:
        """End the process and whatever it started, and tell how it had ended."""
        if self._process.poll() is None:
            self.signal(signal.SIGKILL)
        code = self._process.wait()
        self.signal(
            signal.SIGKILL
        )  # what a child that died by itself has left behind in its process group
        self.stdin.close()
        self.stdout.close()
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def close(self, *, timeout_seconds: float) -> None:
        """End the process: it leaves by itself when its stdin is closed, and is killed when it does
        not.
        """
        self.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_seconds)
        self.kill()

    def signal(self, number: int) -> None:
        """Send a signal to the process and whatever it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def _forward_prints(printed: IO[bytes]) -> None:
    """Write to our own stderr what the child prints, as far as the budget goes, until the child and
    all that it has started are gone.
    """
    budget = PrintBudget(now=time.monotonic())
    with printed:
        while data := os.read(printed.fileno(), READ_BYTES):
            if shown := budget.limit(data, now=time.monotonic()):
                sys.stderr.write(shown.decode(errors="replace"))
                sys.stderr.flush()
