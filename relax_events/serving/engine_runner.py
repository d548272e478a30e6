"""An engine in a thread of its own, and whoever asks it over HTTP.

    event loops    generate, call, pause --> errands --> engine's thread: errands between two polls, polls while something runs
                   samples as they stand  <--------------+

Nothing but that thread touches the engine.
"""

from __future__ import annotations

import asyncio
import queue
import secrets
import threading
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, TypeVar

import structlog
from torch import Tensor

from relax_events.engines.protocol import GeneratedSample, GenerationRequest
from relax_events.engines.transformers.engine import TransformersEngine
from relax_events.errors import EngineFailed
from relax_events.weights import Weights

log = structlog.get_logger()
Result = TypeVar("Result")
POLL_SECONDS = 0.05
"""Between two looks at samples that have not ended."""
CLOSE_SECONDS = 30.0
INITIAL_VERSION_NAME = "default"
"""Of the weights in the model's folder, as SGLang calls them."""
PauseMode = Literal["abort", "retract", "in_place"]


@dataclass(slots=True)
class Subscriber:
    """Who waits for a sample: told of every token, or of the end alone."""

    notify: Callable[[GeneratedSample | EngineFailed, bool], None]
    is_streamed: bool


class EngineRunner:
    """See the module's docstring. Called from event loops, `open` and `close` apart.

    Attributes:
        engine: Used by the station's thread alone, from `open` to `close`.
        names: Of the weights that were loaded, by policy version: each load counts one on.
        failure: Why nothing is generated any more.
    """

    def __init__(self, engine: TransformersEngine) -> None:
        self.engine = engine
        self.names = [INITIAL_VERSION_NAME]
        self.failure: EngineFailed | None = None
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._subscribers: dict[str, Subscriber] = {}
        self._pause: PauseMode | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def open(self) -> None:
        """Let the engine run."""
        self._thread.start()

    def close(self) -> None:
        """Drop what runs, and free the engine."""
        self._tasks.put(None)
        self.engine.interrupt()
        self._thread.join(CLOSE_SECONDS)

    async def generate(
        self, request: GenerationRequest, *, is_streamed: bool
    ) -> AsyncGenerator[tuple[GeneratedSample, bool]]:
        """Generate one sample; give it as it stands, time and again where it is streamed, and with
        True when it has ended.

        Who stops listening ends it.

        Raises:
            PoisonSample: It can't be generated.
            EngineFailed: The engine is broken.
        """
        (sample,) = request.samples
        loop, found = (
            asyncio.get_running_loop(),
            asyncio.Queue[tuple[GeneratedSample | EngineFailed, bool]](),
        )

        def notify(what: GeneratedSample | EngineFailed, has_ended: bool) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(found.put_nowait, (what, has_ended))

        def begin() -> None:
            self.engine.submit(request)
            self._subscribers[sample.sample_id] = Subscriber(notify, is_streamed)

        await self.call(begin)
        has_ended = False
        try:
            while not has_ended:
                what, has_ended = await found.get()
                if isinstance(what, EngineFailed):
                    raise what
                yield what, has_ended
        finally:
            if not has_ended:
                self._enqueue(lambda: self._drop(sample.sample_id))

    async def call(self, work: Callable[[], Result]) -> Result:
        """Have something done by the engine's thread, between two tokens; raises what it raises."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Result] = loop.create_future()

        def finish(set_it: Callable[..., None], value: object) -> None:
            if not done.done():
                set_it(value)

        def task() -> None:
            try:
                result = work()
            except Exception as error:
                loop.call_soon_threadsafe(finish, done.set_exception, error)
            else:
                loop.call_soon_threadsafe(finish, done.set_result, result)

        self._enqueue(task)
        if (
            self.failure is not None
        ):  # looked at last: nobody does errands any more that come after it
            raise self.failure
        return await done

    async def abort(self, rid: str | None) -> None:
        """End samples before their time, all of them without an id; whoever waits for one is given
        what it has.
        """
        await self.call(
            lambda: self._hand_out(self.engine.abort(None if rid is None else self._matching(rid)))
        )

    async def pause(self, mode: PauseMode) -> None:
        """Draw no further token: `abort` ends what runs, `retract` gives its cache up, `in_place`
        keeps it.
        """

        def stop() -> None:
            self._pause = mode
            if mode == "abort":
                self._hand_out(self.engine.abort())
            elif mode == "retract":
                self.engine.sleep()
                self.engine.wake()

        await self.call(stop)

    async def resume(self) -> None:
        """Undo `pause`."""

        def start() -> None:
            self._pause = None

        await self.call(start)

    async def load_weights(self, read: Callable[[], Mapping[str, Tensor]], *, name: str) -> None:
        """Go over to other weights; what runs goes on under them, its cache computed again unless
        it was paused in place.

        Args:
            read: Gives them by name; called in a thread of its own.
            name: What tokens from here on say.
        Raises:
            WeightsError, ConfigError: They don't fit, or can't be read; the old ones serve.
        """
        tensors = await asyncio.to_thread(read)

        def swap() -> None:
            version = Weights(len(self.names), tensors, b"")
            self.engine.load_weights(
                version, on_running="swap" if self._pause == "in_place" else "restart"
            )
            self.names.append(name or self.names[-1])

        await self.call(swap)

    def _enqueue(self, task: Callable[[], None]) -> None:
        self._tasks.put(task)
        self.engine.interrupt()

    def _matching(self, rid: str) -> list[str]:
        """Return the samples of a request: of several that it asked for, each has the request's id
        and a number.
        """
        return [name for name in self._subscribers if name == rid or name.rpartition("/")[0] == rid]

    def _drop(self, sample_id: str) -> None:
        self._subscribers.pop(sample_id, None)
        self.engine.abort([sample_id])

    def _run(self) -> None:
        try:
            while self._run_tasks():
                if self._pause is None:
                    self._hand_out(self.engine.poll(timeout_seconds=POLL_SECONDS))
                    for sample in self.engine.snapshot(
                        [name for name, one in self._subscribers.items() if one.is_streamed]
                    ):
                        self._subscribers[sample.sample_id].notify(sample, False)
        except Exception as error:
            log.exception("engine.failed")
            self.failure = EngineFailed(f"the engine is broken: {error!r}; start it again")
            for subscriber in self._subscribers.values():
                subscriber.notify(self.failure, True)
            self._run_remaining_tasks()
        self.engine.close()

    def _run_tasks(self) -> bool:
        """Do what waits, and wait for something where there is nothing to generate; return False at
        the end.
        """
        is_idle = self._pause is not None or not self.engine.num_running
        while is_idle or not self._tasks.empty():
            if (task := self._tasks.get()) is None:
                return False
            task()
            is_idle = self._pause is not None or not self.engine.num_running
        return True

    def _run_remaining_tasks(self) -> None:
        """Answer who called in the instant of the failure."""
        while not self._tasks.empty():
            if (task := self._tasks.get()) is not None:
                task()

    def _hand_out(self, samples: list[GeneratedSample]) -> None:
        for sample in samples:
            if (subscriber := self._subscribers.pop(sample.sample_id, None)) is not None:
                subscriber.notify(sample, True)


def new_seed() -> int:
    """Give a seed for a request that brings none."""
    return secrets.randbits(63)
