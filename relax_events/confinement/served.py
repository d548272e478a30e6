"""The child's side of `ChildPool`: it takes requests from its stdin and answers on its stdout."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any

from relax_events.confinement.frames import (
    Buffer,
    Frame,
    FrameLimits,
    build_frame,
    encode_head,
    read_frame,
)

RENEW = "renew"
"""Key of an answer after which the parent replaces the child: `REPLACE`, or `RETRY` to have the
request repeated by the new child, unless it was the first of this one."""
REPLACE, RETRY = "replace", "retry"
LOAD_ERROR = "load_error"
MAX_IN_FLIGHT, IS_CONCURRENT = "max_in_flight", "is_concurrent"
"""Keys of the first message: how many requests the child holds at a time, 1 if it does not say so,
and whether it works on them at the same time."""
BLOCKING = "blocking"
"""Key of a message: the number of the request that blocks all others, 0 if it isn't known."""
FAILURE = "failure"
MAX_FAILURE_CHARACTERS = 600
Answer = tuple[Mapping[str, Any], Sequence[Buffer]]


class Served:
    """The pipes of a child process. What foreign code prints goes to stderr, and it reads
    nothing.
    """

    def __init__(self) -> None:
        """Take over stdin and stdout, read the setup, and limit the memory to its
        `memory_bytes`.
        """
        self._answers: IO[bytes] = os.fdopen(os.dup(1), "wb")
        self._requests: IO[bytes] = os.fdopen(os.dup(0), "rb")
        self._lock = threading.Lock()
        os.dup2(2, 1)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        first = read_frame(self._requests, FrameLimits())
        if first is None:
            os._exit(0)  # the parent ended meanwhile
        self.setup = first.head
        memory_bytes = self.setup["memory_bytes"]
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))

    def report_ready(self, facts: Mapping[str, Any]) -> None:
        """Say that the child is loaded, with what the parent wants to know."""
        self.answer(0, facts)

    def report_load_error(self, text: str) -> None:
        """Say why the child can't be loaded."""
        self.answer(0, {LOAD_ERROR: text})

    def serve(self, handle: Callable[[Frame], Answer]) -> None:
        """Answer one request after the other, until the parent closes the pipe.

        Raises:
            Exception: What `handle` raises, after it was sent to the parent.
        """
        for request in self.requests():
            try:
                self.answer(request.number, *handle(request))
            except Exception as error:
                self.fail(request.number, error)
                raise

    def tick(self) -> None:
        """Say that the child is well, although it answers nothing."""
        self.answer(0, {})

    def report_blocking(self, number: int) -> None:
        """Say which request keeps the child from working on the others; a tick takes it back."""
        self.answer(0, {BLOCKING: number})

    def requests(self) -> Iterator[Frame]:
        """Yield the requests, until the parent closes the pipe."""
        while (request := read_frame(self._requests, FrameLimits())) is not None:
            yield request

    def answer(self, number: int, head: Mapping[str, Any], contents: Sequence[Buffer] = ()) -> None:
        """Answer a request, from any thread."""
        line = encode_head(head, contents)
        with self._lock:
            self._answers.writelines(build_frame(line, contents, number))
            self._answers.flush()

    def fail(self, number: int, error: BaseException) -> None:
        """Say that an unexpected error ends this child."""
        text = f"{type(error).__name__}: {error}"[:MAX_FAILURE_CHARACTERS]
        self.answer(number, {FAILURE: text})
