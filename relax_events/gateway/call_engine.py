"""An engine whose samples are calls of an event loop; another thread submits and polls them."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import dataclass

from relax_events.engines.protocol import Engine, GeneratedSample, GenerationRequest
from relax_events.engines.turn_engine import TurnEngine
from relax_events.errors import EngineFailed, PoisonSample


@dataclass(slots=True, eq=False)
class EngineCall:
    """A call on its way to the engine."""

    request: GenerationRequest
    done: Future[GeneratedSample]
    is_cancelled: bool = False


class CallEngine(TurnEngine[EngineCall | GeneratedSample]):
    """See the module's docstring."""

    def __init__(self, engine: Engine) -> None:
        """Wrap an engine, which the polling thread alone uses."""
        super().__init__(engine)
        self._calls: dict[str, EngineCall] = {}

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

    def _take_item(self, item: EngineCall | GeneratedSample) -> None:
        """Submit a call, or abort the sample of a cancelled one."""
        assert isinstance(item, EngineCall)
        name = item.request.samples[0].sample_id
        if item.is_cancelled:
            if self._calls.pop(name, None) is not None:
                self._engine.abort([name])
            return
        if not item.done.set_running_or_notify_cancel():
            return
        try:
            self._engine.submit(item.request)
        except PoisonSample as error:
            item.done.set_exception(error)
            return
        self._calls[name] = item

    def _take_turn(self, turn: GeneratedSample) -> None:
        """Answer a call."""
        call = self._calls.pop(turn.sample_id, None)
        if call is not None:
            call.done.set_result(turn)

    def _fail_calls(self, names: Collection[str], error: EngineFailed) -> None:
        """Answer submitted calls with an error."""
        for name in names:
            self._calls.pop(name).done.set_exception(error)
