"""One child process, from the worker's side: its pipes, its running requests, and how it ends."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Any

from relax_events.confinement.frames import (
    Buffer,
    Frame,
    FrameLimits,
    FrameReader,
    InvalidFrame,
    build_frame,
)
from relax_events.confinement.prints import PrintBudget
from relax_events.confinement.profiles import Confinement
from relax_events.confinement.requests import Kind, Reply, Request, describe_exit
from relax_events.confinement.served import BLOCKING, FAILURE

EXIT_SECONDS = 1.0
"""For a child that closed its pipes to exit by itself, so that its own exit code is known."""
MAX_BUFFERS = 256
PRINT_BYTES = 1 << 16


@dataclass(slots=True)
class Received:
    """What has arrived from a child.

    Attributes:
        answers: Oldest first, each with its request; None with a message that answers none.
        loss: Why the child is lost after these answers: the kind, and the beginning of its ending.
    """

    answers: list[tuple[Request | None, Reply]] = field(default_factory=list)
    loss: tuple[Kind, str] | None = None


class Child:
    """A running child process. Used in the driver's thread only, except `pid` and `number`."""

    _numbers = count(1)

    def __init__(
        self,
        module: str,
        *,
        confinement: Confinement,
        variables: Mapping[str, str],
        setup: bytes,
        limits: FrameLimits,
    ) -> None:
        """Start the process; it has loaded what it needs once `ready` is set.

        Args:
            module: Ours, which it runs.
            confinement: What it may touch.
            variables: Its environment.
            setup: Its first message, an encoded head.
            limits: The largest answer.
        Raises:
            OSError: No process can be started.
        """
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "relax_events.confinement.launch"),
                *(confinement.to_json(), module),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            env=dict(variables),
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self.stdin, self.stdout = self._process.stdin.fileno(), self._process.stdout.fileno()
        self.stderr = self._process.stderr.fileno()
        for pipe in (self.stdin, self.stdout, self.stderr):
            os.set_blocking(pipe, False)
        self.number = next(self._numbers)
        self.ready: dict[str, Any] | None = None
        self.is_concurrent = False
        self.num_answered = 0
        self._blocking: Request | None = None
        self.requests: dict[int, Request] = {}
        self.started = self.heard = time.monotonic()
        self._reader = FrameReader(limits)
        self._outgoing: deque[memoryview] = deque()
        self._prints = PrintBudget(now=self.started)
        self._request_numbers = count(1)
        self._write_frame(setup, (), 0)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def has_outgoing(self) -> bool:
        """Whether bytes wait for room in the pipe."""
        return bool(self._outgoing)

    @property
    def is_isolating(self) -> bool:
        """Whether it runs a request that must run alone."""
        return any(request.is_alone for request in self.requests.values())

    def send(self, requests: Iterable[Request]) -> None:
        """Queue requests, and write as much as the pipe accepts."""
        now = time.monotonic()
        for request in requests:
            number = next(self._request_numbers)
            request.started = now
            self.requests[number] = request
            self._write_frame(request.line, request.contents, number)
        self.write()

    def _write_frame(self, line: bytes, contents: Sequence[Buffer], number: int) -> None:
        first, *rest = build_frame(line, contents, number)
        self._outgoing.append(memoryview(first))
        self._outgoing.extend(memoryview(part).cast("B") for part in rest if len(part))

    def write(self) -> None:
        """Write as much as the pipe accepts; that a child died is seen when its answers end."""
        try:
            while self._outgoing:
                self._drop_written(os.writev(self.stdin, list(islice(self._outgoing, MAX_BUFFERS))))
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._outgoing.clear()

    def _drop_written(self, num_bytes: int) -> None:
        while num_bytes:
            first = self._outgoing[0]
            if num_bytes < len(first):
                self._outgoing[0] = first[num_bytes:]
                return
            num_bytes -= len(first)
            self._outgoing.popleft()

    def receive(self) -> Received:
        """Read the answers that have arrived, each with its request."""
        try:
            is_open = self._reader.receive(self.stdout)
        except BlockingIOError:
            return Received()
        received = Received() if is_open else Received(loss=("died", ""))
        try:
            for frame in self._reader.frames():
                if FAILURE in frame.head:
                    received.loss = ("died", f"{frame.head[FAILURE]}; ")
                    break
                received.answers.append(self._match(frame))
        except InvalidFrame as error:
            received.loss = ("invalid", str(error))
        if any(BLOCKING not in reply.head for _, reply in received.answers):
            self.heard = time.monotonic()
        if any(request is not None for request, _ in received.answers):
            self._restart_clock()  # not at a tick: a late child ticks too
        return received

    def _match(self, frame: Frame) -> tuple[Request | None, Reply]:
        reply = Reply(frame.head, frame.contents, self.number)
        blocking = frame.head.get(BLOCKING) if frame.number == 0 else None
        self._blocking = self.requests.get(blocking) if isinstance(blocking, int) else None
        if frame.number == 0:
            return None, reply
        request = self.requests.pop(frame.number, None)
        if request is None:
            raise InvalidFrame("an answer to no request")
        self.num_answered += 1
        return request, reply

    def _restart_clock(self) -> None:
        """The oldest request of a child that takes one after the other begins now."""
        if not self.is_concurrent and self.requests:
            next(iter(self.requests.values())).started = self.heard

    def deadline(self, *, start_seconds: float, silent_seconds: float | None) -> float | None:
        """Return when the child is late, on the monotonic clock; None while it has no work."""
        if self.ready is None:
            return self.started + start_seconds
        if not self.requests:
            return None
        running = list(self.requests.values())
        if not self.is_concurrent:
            running = running[:1]
        earliest = min(request.started + request.seconds for request in running)
        if silent_seconds is None:
            return earliest
        first = min(request.started for request in running)
        return min(earliest, max(self.heard, first) + silent_seconds)

    def list_suspects(self) -> list[Request]:
        """Return the running requests that may be why the child is lost: the one that it says
        blocks the others, the first where it takes one after the other, else all.
        """
        if self._blocking is not None:
            return [self._blocking]
        running = list(self.requests.values())
        return running if self.is_concurrent else running[:1]

    def read_prints(self) -> bool:
        """Pass on what the child prints, within a budget; False once its stderr is closed."""
        try:
            data = os.read(self.stderr, PRINT_BYTES)
        except BlockingIOError:
            return True
        if shown := self._prints.limit(data, now=time.monotonic()):
            sys.stderr.write(shown.decode(errors="replace"))
            sys.stderr.flush()
        return bool(data)

    def close_requests(self) -> None:
        """Close its stdin: a child that keeps the protocol then exits."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def end(self, *, exit_seconds: float = 0.0) -> str:
        """Kill the process and its descendants; return its exit code or signal, readable.

        Args:
            exit_seconds: Time to exit by itself before.
        """
        if exit_seconds:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(exit_seconds)
        self._kill_process_group()
        code = self._process.wait()
        self._kill_process_group()  # what a dead child left
        while self._has_prints() and self.read_prints():
            continue
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()
        return describe_exit(code)

    def _has_prints(self) -> bool:
        with contextlib.suppress(OSError, ValueError):
            return bool(select.select([self.stderr], [], [], 0)[0])
        return False

    def _kill_process_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
