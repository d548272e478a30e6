"""One engine of a router, opened and used by one thread, and reopened after a failure.

    router's thread    submit, abort, load, sleep, wake --> calls ---+
    replica's thread   open --> calls, poll --> ... --> lost         | executed or rejected
                        ^                         |                  v
                        +-- pause, 0 at first -- close     events: opened, finished, lost, crashed

The samples of a lost engine go back to the router with their tokens.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import closing, suppress
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Literal, TypeVar

from relax_events.engines.protocol import Engine, EngineUsage, GeneratedSample, GenerationRequest
from relax_events.engines.replicas.opening import OpeningGate
from relax_events.engines.replicas.policies import MIN_PAUSE_SECONDS, CircuitBreaker
from relax_events.errors import (
    ConfigError,
    EngineFailed,
    EnvironmentProblem,
    RelaxError,
    WeightsError,
)
from relax_events.weights import Weights

POLL_SECONDS = 60.0
"""A poll is interrupted by a call."""
IDLE_SECONDS = 1.0
"""Interval at which an idle engine is polled, to detect its failure."""
CLOSE_SECONDS = 10.0
Result = TypeVar("Result")


class WeightsOverwritten(WeightsError):
    """The tensors of a version were overwritten in memory by the next version."""


class ReplicaState(Enum):
    """State of a replica, as its router sees it."""

    OPENING = "opening"
    LOADING = "loading"
    SERVING = "serving"
    IDLE = "idle"
    """Open without the router's version, whose tensors are no longer in memory; waits for the next.
    """
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class ReplicaOpened:
    """A replica's engine is open, with the weights of the model's folder."""

    replica: Replica


@dataclass(frozen=True, slots=True)
class SamplesFinished:
    """Samples have finished."""

    replica: Replica
    samples: list[GeneratedSample]


@dataclass(frozen=True, slots=True)
class ReplicaLost:
    """A replica's engine is lost or did not open, and will be reopened. `samples` are its
    unfinished samples with the tokens received so far.
    """

    replica: Replica
    error: RelaxError
    samples: list[GeneratedSample]


@dataclass(frozen=True, slots=True)
class WeightsLoaded:
    """A replica that catches up has loaded a version, or rejected it."""

    replica: Replica
    policy_version: int
    error: BaseException | None


@dataclass(frozen=True, slots=True)
class ReplicaCrashed:
    """A replica's thread has ended with an unexpected error."""

    error: BaseException


ReplicaEvent = ReplicaOpened | SamplesFinished | ReplicaLost | WeightsLoaded | ReplicaCrashed


@dataclass(slots=True)
class EngineCall:
    """A call to an engine, executed in its thread."""

    action: Callable[[Engine], object]
    outcome: Future[object]


class Replica:
    """One engine and its thread; see the module's docstring. Only the router's thread uses `state`
    and `num_samples`.
    """

    def __init__(
        self,
        name: str,
        open_engine: Callable[[], Engine],
        *,
        on_event: Callable[[ReplicaEvent], None],
    ) -> None:
        """Start the thread that opens the engine.

        Args:
            name: Determines which prompt groups prefer this replica.
            open_engine: Opens the engine, with the weights of the model's folder.
            on_event: Receives events, in the replica's thread.
        """
        self.name, self.circuit_breaker, self.gate = name, CircuitBreaker(), OpeningGate()
        self.state, self.num_samples = ReplicaState.OPENING, 0
        self._open_engine, self._on_event = open_engine, on_event
        self._calls: queue.SimpleQueue[EngineCall | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._engine: Engine | None = None
        self._past_usage = EngineUsage()
        self._is_asleep = False
        self._thread = threading.Thread(target=self._run, name=f"engine {name}", daemon=True)
        self._thread.start()

    @property
    def usage(self) -> EngineUsage:
        """The engine's samples, and the token totals of it and its predecessors."""
        with self._lock:
            return (
                self._past_usage
                if self._engine is None
                else sum_usage([self._past_usage, self._engine.usage])
            )

    def submit(self, request: GenerationRequest) -> None:
        """Submit samples to the engine.

        Raises:
            PoisonSample: As for `Engine.submit`.
            EngineFailed: The engine is lost; nothing of the request is queued.
        """
        self._call(lambda engine: engine.submit(request)).result()

    def abort(self, sample_ids: Collection[str]) -> list[GeneratedSample]:
        """Remove samples and return them with their tokens so far.

        Raises:
            EngineFailed: The engine is lost; the event `ReplicaLost` has its samples.
        """
        return self._call(lambda engine: engine.abort(sample_ids)).result()

    def load(self, weights: Weights, *, on_running: Literal["swap", "restart"]) -> Future[None]:
        """Load another version; the future fails with `WeightsError` if the engine rejects it, with
        `EngineFailed` if the engine is lost.
        """

        def load(engine: Engine) -> None:
            self.gate.use()
            engine.load_weights(weights, on_running=on_running)
            self._is_asleep = False

        return self._call(load)

    def verify(self, weights: Weights, load: Future[None]) -> Future[None]:
        """Check, after a load that the router did not wait for, that its tensors did not change
        meanwhile.

        Returns:
            The outcome of the load, or `WeightsOverwritten`: broadcast tensors stay in memory only
            until the next version.
        """

        def verify(_: Engine) -> None:
            from relax_events.weights.artifact_writer import weights_digest  # imports torch

            load.result()
            if weights_digest(weights.tensors) != weights.digest:
                raise WeightsOverwritten(
                    f"policy version {weights.policy_version} is no longer in memory"
                )

        return self._call(verify)

    def sleep(self) -> Future[None]:
        """Let the engine release its memory."""
        return self._call(self._sleep)

    def wake(self) -> Future[None]:
        """Let the engine allocate its memory again."""

        def wake(engine: Engine) -> None:
            self.gate.use()
            engine.wake()
            self._is_asleep = False

        return self._call(wake)

    def recycle(self, reason: str) -> None:
        """Close and reopen the engine, as if it were lost."""

        def fail(_: Engine) -> None:
            raise EngineFailed(reason)

        self._call(fail)

    def close(self) -> None:
        """Let the thread close the engine and end; `join` waits for it."""
        self.gate.close()
        self._calls.put(None)
        if (engine := self._engine) is not None:
            engine.interrupt()

    def join(self) -> None:
        """Wait for the thread; if it is still starting a server, both end with the process."""
        self._thread.join(CLOSE_SECONDS)

    def _call(self, action: Callable[[Engine], Result]) -> Future[Result]:
        """Execute a call in the thread; fail at once if there is no engine."""
        outcome: Future[Result] = Future()
        with self._lock:
            if (engine := self._engine) is None:
                outcome.set_exception(EngineFailed(f"engine {self.name} is lost"))
                return outcome
            self._calls.put(EngineCall(action, outcome))  # type: ignore[arg-type]
        engine.interrupt()
        return outcome

    def _run(self) -> None:
        try:
            pause_seconds = 0.0
            while self.gate.enter(pause_seconds=pause_seconds):
                pause_seconds = self._run_engine()
        except BaseException as error:  # the router raises it in the worker's thread
            self._on_event(ReplicaCrashed(error))
        finally:
            self.gate.leave()

    def _run_engine(self) -> float:
        """Open an engine and use it until it is lost or closed; return the pause before the next
        attempt.
        """
        try:
            engine = self._open_engine()
        except (EngineFailed, EnvironmentProblem, ConfigError) as error:
            pause_seconds = max(MIN_PAUSE_SECONDS, self.circuit_breaker.record_failure())
            self._on_event(ReplicaLost(self, error, []))
            return pause_seconds
        with closing(engine):
            self._is_asleep = False
            self._engine = engine
            if self.gate.is_held:  # since it began to open
                self._sleep(engine)
            self._on_event(ReplicaOpened(self))
            pause_seconds = 0.0
            try:
                self._serve_calls(engine)
            except EngineFailed as error:
                self._reject_calls()
                pause_seconds = self.circuit_breaker.record_failure()
                self._on_event(ReplicaLost(self, error, self._salvage(engine)))
            finally:
                self._reject_calls()
            return pause_seconds

    def _sleep(self, engine: Engine) -> None:
        engine.sleep()
        self._is_asleep = True
        self.gate.leave()

    def _serve_calls(self, engine: Engine) -> None:
        while True:
            is_busy = engine.num_running > 0 and not self._is_asleep
            if samples := engine.poll(timeout_seconds=POLL_SECONDS if is_busy else 0.0):
                self.circuit_breaker.record_success()
                self._on_event(SamplesFinished(self, samples))
            with suppress(queue.Empty):
                call = (
                    self._calls.get_nowait() if is_busy else self._calls.get(timeout=IDLE_SECONDS)
                )
                while True:
                    if call is None:
                        return
                    self._execute(call, engine)
                    call = self._calls.get_nowait()

    def _execute(self, call: EngineCall, engine: Engine) -> None:
        try:
            outcome = call.action(engine)
        except BaseException as error:  # raised in the caller's thread
            call.outcome.set_exception(error)
            if isinstance(error, EngineFailed) or not isinstance(error, RelaxError):
                raise
        else:
            call.outcome.set_result(outcome)

    def _reject_calls(self) -> None:
        """Stop accepting calls, and reject the queued ones."""
        with self._lock:
            if self._engine is not None:
                self._past_usage = replace(
                    sum_usage([self._past_usage, self._engine.usage]), num_decoding=0, num_waiting=0
                )
            self._engine = None
        error = EngineFailed(f"engine {self.name} is lost")
        with suppress(queue.Empty):
            while True:
                if (call := self._calls.get_nowait()) is not None:
                    call.outcome.set_exception(error)

    def _salvage(self, engine: Engine) -> list[GeneratedSample]:
        """Return the unfinished samples of a lost engine with their tokens, and report the
        finished ones.
        """
        samples: list[GeneratedSample] = []
        with suppress(EngineFailed):
            samples = engine.abort()
        with suppress(EngineFailed):
            if finished := engine.poll(timeout_seconds=0.0):
                self._on_event(SamplesFinished(self, finished))
        return samples


def sum_usage(usages: Sequence[EngineUsage]) -> EngineUsage:
    """Add up the usage of several engines."""
    return EngineUsage(
        **{
            field.name: sum(getattr(usage, field.name) for usage in usages)
            for field in fields(EngineUsage)
        }
    )
