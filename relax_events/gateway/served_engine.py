"""The engine of a model without a run, polled by a thread of its own."""

from __future__ import annotations

import threading

import structlog

from relax_events.engines.protocol import Engine
from relax_events.episodes.call_engine import CallEngine, EngineCall
from relax_events.errors import EngineFailed

log = structlog.get_logger()
POLL_SECONDS = 1.0
CLOSE_SECONDS = 30.0


class ServedEngine(CallEngine):
    """Answers the calls of an event loop from `open` to `close`.

    Attributes:
        failure: The error that stopped the engine; every call is answered with it.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.failure: EngineFailed | None = None
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def open(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Fail the calls that wait, and close the engine."""
        self._is_closing = True
        self.interrupt()
        self._thread.join(CLOSE_SECONDS)

    @property
    def _is_waiting(self) -> bool:
        return True

    def _put(self, call: EngineCall | None) -> None:
        super()._put(call)
        if self.failure is not None:  # checked last: nothing takes what is queued after the failure
            self._fail_queued(self.failure)

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self.poll(timeout_seconds=POLL_SECONDS)
            failure = EngineFailed("the server has stopped; call again once it is restarted")
        except Exception as error:
            log.exception("engine.failed")
            failure = EngineFailed(f"the engine has failed: {error!r}; restart the server")
        self.failure = failure
        self._fail_calls(failure)
        self._fail_queued(failure)
        self._engine.close()
