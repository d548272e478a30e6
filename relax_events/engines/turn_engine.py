"""An engine over another one, whose samples leave it between their turns: an environment replies,
or a program calls again. What comes back is queued from any thread, and taken by the loop's thread.
"""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from typing import Generic, Literal, TypeVar

from relax_events.engines.protocol import (
    Engine,
    EngineUsage,
    EnvironmentContext,
    GeneratedSample,
    GenerationRequest,
)
from relax_events.errors import PoisonSample
from relax_events.weights import Weights

Item = TypeVar("Item")


def require_context(request: GenerationRequest) -> EnvironmentContext:
    """Return what a request's environment gets.

    Raises:
        PoisonSample: The request has nothing for an environment.
    """
    if request.environment_context is None:
        raise PoisonSample(
            f"prompt group {request.prompt_group_id} has no context for the environment"
        )
    return request.environment_context


class TurnEngine(ABC, Generic[Item]):
    """The part of `Engine` that does not depend on what happens between the turns; weights and
    device memory are the inner engine's.
    """

    def __init__(self, engine: Engine) -> None:
        """Wrap an engine, which generates the turns."""
        self._engine = engine
        self._finished: list[GeneratedSample] = []
        self._inbox: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        self._interrupted = threading.Event()

    @property
    @abstractmethod
    def _is_waiting(self) -> bool:
        """Whether samples wait for something that is queued later."""

    @abstractmethod
    def _take_turn(self, turn: GeneratedSample) -> None:
        """Process a turn that the inner engine has finished."""

    @abstractmethod
    def _take_item(self, item: Item) -> None:
        """Process something that was queued."""

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
        if not self._finished and not self._interrupted.is_set():
            if self._engine.num_running:
                for turn in self._engine.poll(timeout_seconds=timeout_seconds):
                    self._take_turn(turn)
            elif self._is_waiting:
                self._take(timeout_seconds=timeout_seconds)
        self._interrupted.clear()
        finished, self._finished = self._finished, []
        return finished

    def interrupt(self) -> None:
        """Make a waiting poll return, from any thread."""
        self._interrupted.set()
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

    def _put(self, item: Item | None) -> None:
        """Queue an item, from any thread; the inner engine is interrupted after its next token."""
        self._inbox.put(item)
        self._engine.interrupt()

    def _take(self, *, timeout_seconds: float = 0.0) -> None:
        """Process what is queued, waiting for the first item with a timeout."""
        try:
            item = (
                self._inbox.get(timeout=timeout_seconds)
                if timeout_seconds
                else self._inbox.get_nowait()
            )
            while True:
                if item is not None:
                    self._take_item(item)
                item = self._inbox.get_nowait()
        except queue.Empty:
            return
