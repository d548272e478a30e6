"""Answers that several pages of a run ask for: computed once for each state of the reader."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Generic, TypeVar

import orjson

Value = TypeVar("Value")
MAX_ANSWERS = 64
REST_OF_TIME = 20.0
"""How many times as long as it read something the server then reads it not."""
CLOCK_SECONDS = 5.0
"""Kept so long at most: an answer depends on the time too, for example by a heartbeat's age."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The bytes of an answer, and the tag by which a page recognizes it."""

    body: bytes
    tag: str

    @classmethod
    def of(cls, value: object) -> Answer:
        """Encode a value as JSON."""
        body = encode_json(value)
        return cls(body, f'"{blake2b(body, digest_size=12).hexdigest()}"')


def encode_json(value: object) -> bytes:
    """Encode a value, keys of other types than text included."""
    return orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS, default=str)


class _Slot:
    """The newest answer to a question."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.state: tuple[int, int] | None = None
        self.answer: Answer | None = None


class Answers:
    """Keeps the newest answer to each question. Threads that ask the same wait for one of them."""

    def __init__(self, revision: Callable[[], int]) -> None:
        """Keep nothing yet.

        Args:
            revision: Returns the number of the reader's state; it changes with the state.
        """
        self._revision = revision
        self._slots: OrderedDict[str, _Slot] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, question: str, compute: Callable[[], object]) -> Answer:
        """Return the answer to a question, at least as new as the state at the call.

        Args:
            question: Names the view and its arguments.
            compute: Computes the answer where the kept one is of an older state.
        """
        slot = self._slot(question)
        with slot.lock:
            state = self._revision(), int(time.monotonic() / CLOCK_SECONDS)
            if slot.answer is None or slot.state != state:
                slot.answer, slot.state = Answer.of(compute()), state
            return slot.answer

    def _slot(self, question: str) -> _Slot:
        with self._lock:
            slot = self._slots.setdefault(question, _Slot())
            self._slots.move_to_end(question)
            if len(self._slots) > MAX_ANSWERS:
                self._slots.popitem(last=False)
            return slot


class Remembered(Generic[Value]):
    """A value that is read from the broker at most once in a while, and the longer reading takes,
    the more rarely. Threads that ask at once wait for one of them.
    """

    def __init__(
        self,
        read: Callable[[], Value],
        *,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Read nothing yet.

        Args:
            read: Reads the value.
            seconds: How old the value may be at least.
            clock: Returns seconds.
        """
        self._read, self._seconds, self._clock = read, seconds, clock
        self._lock = threading.Lock()
        self._value: Value | None = None
        self._read_until = -math.inf

    def get(self) -> Value:
        """Return the value, read again when it is too old; raises as reading does."""
        with self._lock:
            began = self._clock()
            if self._value is None or began > self._read_until:
                self._value = self._read()
                ended = self._clock()
                self._read_until = ended + max(self._seconds, REST_OF_TIME * (ended - began))
            return self._value

    def forget(self) -> None:
        """Read the value at the next call."""
        with self._lock:
            self._value = None


class Bell:
    """Wakes the coroutines that wait for news; any thread rings."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
        self._num_rings = 0

    def ring(self) -> None:
        """Wake all that wait."""
        with self._lock:
            self._num_rings += 1
            waiting, self._waiting = self._waiting, []
        for loop, event in waiting:
            if not loop.is_closed():
                loop.call_soon_threadsafe(event.set)

    @property
    def num_rings(self) -> int:
        """How often it was rung."""
        return self._num_rings

    async def wait(self, *, num_heard: int, timeout_seconds: float) -> None:
        """Wait until it was rung more than `num_heard` times, or until the timeout."""
        event = asyncio.Event()
        mine = asyncio.get_running_loop(), event
        with self._lock:
            if self._num_rings > num_heard:
                return
            self._waiting.append(mine)
        try:
            async with asyncio.timeout(timeout_seconds):
                await event.wait()
        except TimeoutError:
            pass
        finally:
            with self._lock:
                if mine in self._waiting:
                    self._waiting.remove(mine)
