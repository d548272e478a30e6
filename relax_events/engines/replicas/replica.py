"""One engine among several, opened and used by a thread of its own, and opened anew when it is
lost.

    router's thread    submit, abort, load, sleep, wake --> tasks ---+
    member's thread    open --> tasks, poll --> ... --> lost         |  every task is done, or refused
                        ^                         |                  v
                        +-- pause, nothing at first -- close         events: came, ended, lost, broke

What a lost engine had goes back to the router with its tokens. An event tells nothing that a later
one takes back.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import closing, suppress
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Literal, TypeVar

from relax_events.engines.protocol import Engine, EngineUsage, GeneratedSample, GenerationRequest
from relax_events.engines.replicas.policies import FIRST_PAUSE_SECONDS, Circuit
from relax_events.errors import (
    ConfigError,
    EngineFailed,
    EnvironmentProblem,
    RelaxError,
    WeightsError,
)
from relax_events.weights import Weights

POLL_SECONDS = 60.0
"""A poll is interrupted when there is something to do."""
IDLE_SECONDS = 1.0
"""How often an idle engine is asked whether it is still there."""
CLOSE_SECONDS = 10.0
Result = TypeVar("Result")


class Altered(WeightsError):
    """The tensors of a version are not what they were: their memory is the next one's."""


class Standing(Enum):
    """What a member is to its router."""

    COMING = "coming"
    LOADING = "loading"
    SERVING = "serving"
    IDLE = "idle"
    """Open, and waits for the next version: the one that the others serve can't be had any more."""
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Came:
    """A member's engine is open, with the weights of the model's folder."""

    member: Member


@dataclass(frozen=True, slots=True)
class Ended:
    """Samples have ended."""

    member: Member
    samples: list[GeneratedSample]


@dataclass(frozen=True, slots=True)
class Lost:
    """A member's engine is lost, or did not open; it is opened anew. What it had comes back, as far
    as it is known.
    """

    member: Member
    error: RelaxError
    samples: list[GeneratedSample]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A member that joins has loaded a version, or refused it."""

    member: Member
    policy_version: int
    error: BaseException | None


@dataclass(frozen=True, slots=True)
class Broke:
    """A member's thread met what nobody foresaw, and has ended."""

    error: BaseException


Event = Came | Ended | Lost | Loaded | Broke


@dataclass(slots=True)
class Task:
    """Something to do with an engine, in its thread."""

    work: Callable[[Engine], object]
    outcome: Future[object]


class Member:
    """See the module's docstring. `standing` and `num_samples` are the router's, and only its
    thread touches them.
    """

    def __init__(
        self, name: str, make: Callable[[], Engine], *, tell: Callable[[Event], None]
    ) -> None:
        """Begin to open an engine.

        Args:
            name: Fixes which prompt groups come here first.
            make: Opens the engine, with the weights of the model's folder.
            tell: Takes events, from the member's thread.
        """
        self.name, self.circuit = name, Circuit()
        self.standing, self.num_samples = Standing.COMING, 0
        self._make, self._tell = make, tell
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._engine: Engine | None = None
        self._used = EngineUsage()
        self._is_asleep = self._is_closing = False
        self._thread = threading.Thread(target=self._run, name=f"engine {name}", daemon=True)
        self._thread.start()

    @property
    def usage(self) -> EngineUsage:
        """What the engine does, and what it and those before it have done."""
        with self._lock:
            return self._used if self._engine is None else added([self._used, self._engine.usage])

    def submit(self, request: GenerationRequest) -> None:
        """Hand samples to the engine.

        Raises:
            PoisonSample: As `Engine.submit`.
            EngineFailed: It is lost; nothing of the request is in it.
        """
        self._ask(lambda engine: engine.submit(request)).result()

    def abort(self, sample_ids: Collection[str]) -> list[GeneratedSample]:
        """Take samples out, as they are.

        Raises:
            EngineFailed: The engine is lost; its samples come with its loss.
        """
        return self._ask(lambda engine: engine.abort(sample_ids)).result()

    def load(self, weights: Weights, *, on_running: Literal["swap", "restart"]) -> Future[None]:
        """Have the engine go over to another version; the outcome is a `WeightsError` where it
        refuses, an `EngineFailed` where it is lost.
        """

        def load(engine: Engine) -> None:
            engine.load_weights(weights, on_running=on_running)
            self._is_asleep = False

        return self._ask(load)

    def prove(self, weights: Weights, load: Future[None]) -> Future[None]:
        """Show, behind a load that nobody waited for, that its tensors have been the same all the
        time.

        Returns:
            The outcome of the load, or `Altered`: what comes by broadcast stays as it is only until
                the next version is taken.
        """

        def prove(_: Engine) -> None:
            from relax_events.weights.artifact_writer import weights_digest  # which loads torch

            load.result()
            if weights_digest(weights.tensors) != weights.digest:
                raise Altered(f"policy version {weights.policy_version} is not in memory any more")

        return self._ask(prove)

    def sleep(self) -> Future[None]:
        """Have the engine give its memory back."""

        def lull(engine: Engine) -> None:
            engine.sleep()
            self._is_asleep = True

        return self._ask(lull)

    def wake(self) -> Future[None]:
        """Have the engine take its memory again."""

        def rouse(engine: Engine) -> None:
            engine.wake()
            self._is_asleep = False

        return self._ask(rouse)

    def give_up(self, reason: str) -> None:
        """Have the engine closed and opened anew, as if it were lost."""

        def fail(_: Engine) -> None:
            raise EngineFailed(reason)

        self._ask(fail)

    def close(self) -> None:
        """Have the thread close the engine and end; `join` waits for it."""
        self._is_closing = True
        self._tasks.put(None)
        if (engine := self._engine) is not None:
            engine.interrupt()

    def join(self) -> None:
        """Wait for the thread; one that opens a server ends with the process, and the server with
        it.
        """
        self._thread.join(CLOSE_SECONDS)

    def _ask(self, work: Callable[[Engine], Result]) -> Future[Result]:
        """Have something done in the thread; at once refused where there is no engine."""
        outcome: Future[Result] = Future()
        with self._lock:
            if (engine := self._engine) is None:
                outcome.set_exception(EngineFailed(f"engine {self.name} is lost"))
                return outcome
            self._tasks.put(Task(work, outcome))  # type: ignore[arg-type]
        engine.interrupt()
        return outcome

    def _run(self) -> None:
        try:
            pause_seconds = 0.0
            while self._has_paused(pause_seconds):
                pause_seconds = self._live()
        except BaseException as error:  # it ends the worker, in the worker's own thread
            self._tell(Broke(error))

    def _has_paused(self, seconds: float) -> bool:
        """Wait before the engine is opened; return False when it is not to be."""
        until = time.monotonic() + seconds
        with suppress(queue.Empty):
            while not self._is_closing and (left := until - time.monotonic()) > 0:
                self._tasks.get(
                    timeout=left
                )  # tasks are refused while there is no engine: it can only be the end
        return not self._is_closing

    def _live(self) -> float:
        """Use an engine from its opening until it is lost or to be closed; return for how long to
        pause.
        """
        try:
            engine = self._make()
        except (EngineFailed, EnvironmentProblem, ConfigError) as error:
            pause_seconds = max(FIRST_PAUSE_SECONDS, self.circuit.lose())
            self._tell(Lost(self, error, []))
            return pause_seconds
        with closing(engine):
            self._is_asleep = False
            self._engine = engine
            self._tell(Came(self))
            pause_seconds = 0.0
            try:
                self._use(engine)
            except EngineFailed as error:
                self._refuse_tasks()
                pause_seconds = self.circuit.lose()
                self._tell(Lost(self, error, self._salvaged(engine)))
            finally:
                self._refuse_tasks()
            return pause_seconds

    def _use(self, engine: Engine) -> None:
        while True:
            is_busy = engine.num_running > 0 and not self._is_asleep
            if samples := engine.poll(timeout_seconds=POLL_SECONDS if is_busy else 0.0):
                self.circuit.close()
                self._tell(Ended(self, samples))
            with suppress(queue.Empty):
                task = (
                    self._tasks.get_nowait() if is_busy else self._tasks.get(timeout=IDLE_SECONDS)
                )
                while True:
                    if task is None:
                        return
                    self._do(task, engine)
                    task = self._tasks.get_nowait()

    def _do(self, task: Task, engine: Engine) -> None:
        try:
            outcome = task.work(engine)
        except BaseException as error:  # whoever asked has it raised in its own thread
            task.outcome.set_exception(error)
            if isinstance(error, EngineFailed) or not isinstance(error, RelaxError):
                raise
        else:
            task.outcome.set_result(outcome)

    def _refuse_tasks(self) -> None:
        """Take no tasks any more, and refuse those that were given."""
        with self._lock:
            if self._engine is not None:
                self._used = replace(
                    added([self._used, self._engine.usage]), num_decoding=0, num_waiting=0
                )
            self._engine = None
        error = EngineFailed(f"engine {self.name} is lost")
        with suppress(queue.Empty):
            while True:
                if (task := self._tasks.get_nowait()) is not None:
                    task.outcome.set_exception(error)

    def _salvaged(self, engine: Engine) -> list[GeneratedSample]:
        """Give the samples of a lost engine with the tokens that they have, and tell of those that
        had ended.
        """
        samples: list[GeneratedSample] = []
        with suppress(EngineFailed):
            samples = engine.abort()
        with suppress(EngineFailed):
            if ended := engine.poll(timeout_seconds=0.0):
                self._tell(Ended(self, ended))
        return samples


def added(usages: Sequence[EngineUsage]) -> EngineUsage:
    """Add up what engines do."""
    return EngineUsage(
        **{
            field.name: sum(getattr(usage, field.name) for usage in usages)
            for field in fields(EngineUsage)
        }
    )
