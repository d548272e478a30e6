"""An engine whose samples are calls of an event loop; another thread submits and polls them.

event loop                                    polling thread
generate(request) --> queued -------------->  poll: engine.submit, engine.poll
its turn      <-------------------------  a turn that the engine has finished
"""

from __future__ import annotations

import asyncio
import queue
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from relax_events.engines.protocol import Engine, EngineUsage, GeneratedSample, GenerationRequest
from relax_events.errors import EngineFailed, PoisonSample
from relax_events.weights import Weights


@dataclass(slots=True, eq=False)
class EngineCall:
    """A call on its way to the engine."""

    request: GenerationRequest
    done: Future[GeneratedSample]
    is_cancelled: bool = False

    @property
    def name(self) -> str:
        """The id of its one sample."""
        return self.request.samples[0].sample_id


CallTest = Callable[[EngineCall], bool]


class CallEngine(ABC):
    """The part of `Engine` that does not depend on who calls; weights and device memory are the
    inner engine's.
    """

    def __init__(self, engine: Engine) -> None:
        """Wrap an engine, which the polling thread alone uses."""
        self._engine = engine
        self._calls: dict[str, EngineCall] = {}
        self._finished: list[GeneratedSample] = []
        self._inbox: queue.SimpleQueue[EngineCall | None] = queue.SimpleQueue()
        self._is_interrupted = False

    @property
    @abstractmethod
    def _is_waiting(self) -> bool:
        """Whether calls may follow."""

    async def generate(self, request: GenerationRequest) -> GeneratedSample:
        """Have the polling thread generate the one sample of a request; called in an event loop.
        Cancelling the call aborts the sample.

        Raises:
            PoisonSample: It can't be generated.
            EngineFailed: The engine has failed or was stopped.
        """
        call = EngineCall(request, Future())
        self._put(call)
        try:
            return await asyncio.wrap_future(call.done)
        except asyncio.CancelledError:
            call.is_cancelled = True
            self._put(call)
            raise

    @property
    def policy_version(self) -> int:
        """Policy version of the loaded weights."""
        return self._engine.policy_version

    @property
    def usage(self) -> EngineUsage:
        """Usage of the inner engine; samples between two turns are not included."""
        return self._engine.usage

    def poll(self, *, timeout_seconds: float) -> list[GeneratedSample]:
        """Return the finished samples; see `Engine`. The list may be empty after a turn that does
        not finish its sample.
        """
        self._take()
        if not self._finished and not self._is_interrupted:
            if self._engine.num_running:
                for turn in self._engine.poll(timeout_seconds=timeout_seconds):
                    self._answer(turn)
            elif self._is_waiting:
                self._take(timeout_seconds=timeout_seconds)
        self._is_interrupted = False
        finished, self._finished = self._finished, []
        return finished

    def interrupt(self) -> None:
        """Make a waiting poll return, from any thread."""
        self._is_interrupted = True
        self._put(None)

    def load_weights(
        self, weights: Weights, *, on_running: Literal["swap", "restart"] = "restart"
    ) -> None:
        """Switch to another policy version; later turns, and the rest of running ones, are
        generated with it.
        """
        self._engine.load_weights(weights, on_running=on_running)

    def sleep(self) -> None:
        """Release the device memory."""
        self._engine.sleep()

    def wake(self) -> None:
        """Allocate the device memory again."""
        self._engine.wake()

    def _put(self, call: EngineCall | None) -> None:
        """Queue a call, or None to wake the polling thread, from any thread; the inner engine is
        interrupted after its next token.
        """
        self._inbox.put(call)
        self._engine.interrupt()

    def _take(self, *, timeout_seconds: float = 0.0) -> None:
        """Process what is queued, waiting for the first call with a timeout."""
        try:
            call = (
                self._inbox.get(timeout=timeout_seconds)
                if timeout_seconds
                else self._inbox.get_nowait()
            )
            while True:
                if call is not None:
                    self._take_call(call)
                call = self._inbox.get_nowait()
        except queue.Empty:
            return

    def _take_call(self, call: EngineCall) -> None:
        """Submit a call, or abort the sample of a cancelled one."""
        if call.is_cancelled:
            if self._calls.get(call.name) is call:
                del self._calls[call.name]
                self._engine.abort([call.name])
            return
        if not call.done.set_running_or_notify_cancel():
            return
        try:
            self._engine.submit(call.request)
        except PoisonSample as error:
            call.done.set_exception(error)
            return
        self._calls[call.name] = call

    def _answer(self, turn: GeneratedSample) -> None:
        """Answer the call of a turn."""
        call = self._calls.pop(turn.sample_id, None)
        if call is not None:
            call.done.set_result(turn)

    def _fail_calls(self, error: EngineFailed, *, is_meant: CallTest = lambda _: True) -> None:
        """Answer calls with an error, which the engine no longer has."""
        for call in [one for one in self._calls.values() if is_meant(one)]:
            del self._calls[call.name]
            call.done.set_exception(error)

    def _fail_queued(self, error: EngineFailed, *, is_meant: CallTest = lambda _: True) -> None:
        """Answer queued calls with an error."""
        others = []
        with suppress(queue.Empty):
            while True:
                call = self._inbox.get_nowait()
                if call is None or not is_meant(call):
                    others.append(call)
                elif not call.is_cancelled and call.done.set_running_or_notify_cancel():
                    call.done.set_exception(error)
        for call in others:
            self._inbox.put(call)
