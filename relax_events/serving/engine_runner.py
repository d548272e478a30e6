"""Run an engine in a thread of its own for callers in event loops.

    event loops    generate, call, pause --> tasks --> engine's thread: tasks, polls
                   partial samples      <--------------+

Only that thread uses the engine.
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
"""Between two snapshots of unfinished samples."""
CLOSE_SECONDS = 30.0
INITIAL_VERSION_NAME = "default"
"""SGLang's name for the weights in the model's folder."""
PauseMode = Literal["abort", "retract", "in_place"]


@dataclass(slots=True)
class Subscriber:
    """A caller that waits for a sample: notified of every token, or only of the end."""

    notify: Callable[[GeneratedSample | EngineFailed, bool], None]
    is_streamed: bool


class EngineRunner:
    """The engine's thread and its tasks; see the module's docstring. Called from event loops,
    except `open` and `close`.

    Attributes:
        engine: Used only by the runner's thread, from `open` to `close`.
        version_names: Names of the loaded weights, indexed by policy version; each load adds one.
        failure: The error that stopped the engine.
    """

    def __init__(self, engine: TransformersEngine) -> None:
        self.engine = engine
        self.version_names = [INITIAL_VERSION_NAME]
        self.failure: EngineFailed | None = None
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._subscribers: dict[str, Subscriber] = {}
        self._pause: PauseMode | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def open(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Drop running samples, and close the engine."""
        self._tasks.put(None)
        self.engine.interrupt()
        self._thread.join(CLOSE_SECONDS)

    async def generate(
        self, request: GenerationRequest, *, is_streamed: bool
    ) -> AsyncGenerator[tuple[GeneratedSample, bool]]:
        """Generate one sample; yield it repeatedly if it is streamed, and with True when it has
        finished.

        Closing the generator aborts the sample.

        Raises:
            PoisonSample: It can't be generated.
            EngineFailed: The engine has failed.
        """
        (sample,) = request.samples
        loop, found = (
            asyncio.get_running_loop(),
            asyncio.Queue[tuple[GeneratedSample | EngineFailed, bool]](),
        )

        def notify(what: GeneratedSample | EngineFailed, has_ended: bool) -> None:
            with suppress(RuntimeError):  # the loop is closed: no caller is left
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
        """Run a function in the engine's thread, between two tokens; return its result or raise its
        error.
        """
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
        if self.failure is not None:  # checked last: tasks queued after the failure are never run
            raise self.failure
        return await done

    async def abort(self, rid: str | None) -> None:
        """Abort samples, all of them without an id; their callers get the tokens so far."""
        await self.call(
            lambda: self._hand_out(self.engine.abort(None if rid is None else self._matching(rid)))
        )

    async def pause(self, mode: PauseMode) -> None:
        """Pause generation: `abort` ends running samples, `retract` drops their cache, `in_place`
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
        """Load other weights; running samples continue with them, with a recomputed cache unless
        paused in place.

        Args:
            read: Returns the tensors by name; called in a thread of its own.
            name: Reported with later tokens.
        Raises:
            WeightsError, ConfigError: They don't fit, or can't be read; the old ones serve.
        """
        tensors = await asyncio.to_thread(read)

        def swap() -> None:
            version = Weights(len(self.version_names), tensors, b"")
            self.engine.load_weights(
                version, on_running="swap" if self._pause == "in_place" else "restart"
            )
            self.version_names.append(name or self.version_names[-1])

        await self.call(swap)

    def _enqueue(self, task: Callable[[], None]) -> None:
        self._tasks.put(task)
        self.engine.interrupt()

    def _matching(self, rid: str) -> list[str]:
        """Return the samples of a request: of several, each has the request's id and a number."""
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
            self.failure = EngineFailed(f"the engine has failed: {error!r}; restart the server")
            for subscriber in self._subscribers.values():
                subscriber.notify(self.failure, True)
            self._run_remaining_tasks()
        self.engine.close()

    def _run_tasks(self) -> bool:
        """Run queued tasks, waiting for one if there is nothing to generate; return False at the
        end.
        """
        is_idle = self._pause is not None or not self.engine.num_running
        while is_idle or not self._tasks.empty():
            if (task := self._tasks.get()) is None:
                return False
            task()
            is_idle = self._pause is not None or not self.engine.num_running
        return True

    def _run_remaining_tasks(self) -> None:
        """Run the tasks that were queued at the moment of the failure."""
        while not self._tasks.empty():
            if (task := self._tasks.get()) is not None:
                task()

    def _hand_out(self, samples: list[GeneratedSample]) -> None:
        for sample in samples:
            if (subscriber := self._subscribers.pop(sample.sample_id, None)) is not None:
                subscriber.notify(sample, True)


def new_seed() -> int:
    """Return a seed for a request without one."""
    return secrets.randbits(63)
