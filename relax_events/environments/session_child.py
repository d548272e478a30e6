"""Child process of stateful environments: holds the sessions of many samples. Started only by
`SessionPool`.

    requests  open, step, close, with the session's number, and its files
    answers   what the environment says; a tick each second while the process is well

An environment of coroutines keeps the deadline of each call itself. A call that blocks its event
loop is named to the worker, so that the others are not suspected. One of ordinary functions gets
one call at a time. A call that blocks, or is late there, can't be stopped: the worker kills the
process, and its other sessions are lost.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from typing import Any

from relax_events.confinement.frames import Frame
from relax_events.confinement.served import IS_CONCURRENT, MAX_IN_FLIGHT, Answer, Served
from relax_events.environments.interfaces import load_adapter
from relax_events.environments.interfaces.protocol import (
    DEADLINES,
    Adapter,
    Observation,
    Opening,
    Session,
    Task,
)
from relax_events.environments.reply import Reply
from relax_events.environments.reply_encoding import encode_replies
from relax_events.errors import PoisonSample, RelaxError
from relax_events.events.json_text import format_json, parse_json

TICK_SECONDS = 1.0
BLOCKED_SECONDS = 1.5
"""Between two looks at an event loop that does not tick; the second names the call that blocks it,
well before the worker's grace ends."""
EXIT_SECONDS = 1.0
MAX_ERROR_CHARACTERS = 600
MAX_CONCURRENT = 100_000
_request_number: ContextVar[int] = ContextVar("request_number", default=0)


def main() -> int:
    """Serve until stdin ends: report the loaded adapter, then answer requests."""
    served = Served()
    try:
        adapter = load_adapter(served.setup)
    except (RelaxError, MemoryError) as error:
        limit = f"environment.memory_bytes = {served.setup['memory_bytes']}"
        served.report_load_error(str(error) or f"it needs more than {limit} to load")
        return 2
    served.report_ready(
        {
            "takes_files": adapter.takes_files,
            IS_CONCURRENT: adapter.is_concurrent,
            MAX_IN_FLIGHT: MAX_CONCURRENT if adapter.is_concurrent else 1,
        }
    )
    asyncio.run(SessionServer(adapter, served).serve())
    sys.stderr.flush()
    os._exit(0)  # a thread of foreign code may still run


class RequestTask(asyncio.Task[Any]):
    """A task that knows which request began it, also one that a library creates for a call."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """Create the task in the context of its request."""
        super().__init__(*args, **options)
        self.request_number = _request_number.get()


class SessionServer:
    """Answers the requests of one child process."""

    def __init__(self, adapter: Adapter, served: Served) -> None:
        """Serve the sessions of an adapter.

        Args:
            adapter: The loaded interface.
            served: The pipes; its setup is the section `environment`, with `max_item_bytes`.
        """
        self._adapter, self._served, self._setup = adapter, served, served.setup
        self._sessions: dict[int, Session] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._running: dict[int, asyncio.Task[None]] = {}
        self._has_ticked = threading.Event()
        self._seconds = {stage: self._setup[key] for stage, key in DEADLINES.items()}

    async def serve(self) -> None:
        """Answer until the requests end; then close all sessions within the deadline."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def read() -> None:
            for request in self._served.requests():
                loop.call_soon_threadsafe(self._start, request)
            loop.call_soon_threadsafe(ended.set)
            time.sleep(self._seconds["close"] + EXIT_SECONDS)
            os._exit(1)  # the loop, or a thread, is stuck in foreign code

        threading.Thread(target=read, daemon=True, name="requests").start()
        if self._adapter.is_concurrent:
            loop.set_task_factory(
                lambda loop, work, **options: RequestTask(work, loop=loop, **options)
            )
            watch = threading.Thread(target=self._watch, args=[loop], daemon=True, name="watch")
            watch.start()
        while not ended.is_set():
            self._served.tick()
            self._has_ticked.set()
            with suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), TICK_SECONDS)
        for task in self._running.values():
            task.cancel()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._close_all(), self._seconds["close"])

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Name the request that blocks the event loop, found at two looks without a tick between
        them: in one round of the loop, each task runs once.
        """
        earlier = 0
        while True:
            if self._has_ticked.wait(BLOCKED_SECONDS):
                self._has_ticked.clear()
                earlier = 0
                continue
            number = getattr(asyncio.current_task(loop), "request_number", 0)
            self._served.report_blocking(number if number == earlier else 0)
            earlier = number

    async def _close_all(self) -> None:
        await asyncio.gather(*self._tasks, return_exceptions=True)
        closing = [session.close() for session in self._sessions.values()]
        await asyncio.gather(*closing, return_exceptions=True)

    def _start(self, request: Frame) -> None:
        session, stage = request.head["session"], request.head["op"]
        _request_number.set(request.number)  # in the context of this callback alone
        if stage == "close" and session in self._running:
            self._running[session].cancel()  # the worker no longer waits for it
        task = asyncio.get_running_loop().create_task(self._answer(request))
        self._tasks.add(task)
        if stage != "close":
            self._running[session] = task
            task.add_done_callback(lambda _: self._running.pop(session, None))
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, request: Frame) -> None:
        try:
            head, contents = await self._within_deadline(request)
        except TimeoutError:
            head, contents = {"late": f"took longer than {self._limit(request.head['op'])}"}, ()
        except PoisonSample as error:
            head, contents = {"invalid": str(error)[:MAX_ERROR_CHARACTERS]}, ()
        except asyncio.CancelledError:
            head, contents = {"failed": "was cancelled"}, ()
        except Exception as error:  # foreign code may raise any exception
            head, contents = {"failed": describe_error(error)}, ()
        self._served.answer(request.number, head, contents)

    def _limit(self, stage: str) -> str:
        return f"{self._seconds[stage]:g} s (environment.{DEADLINES[stage]})"

    async def _within_deadline(self, request: Frame) -> Answer:
        seconds = self._seconds[request.head["op"]] if self._adapter.is_concurrent else None
        async with asyncio.timeout(seconds):
            return await self._call(request)

    async def _call(self, request: Frame) -> Answer:
        number, stage = request.head["session"], request.head["op"]
        if stage == "open":
            session = self._adapter.begin(_read_task(request))
            self._sessions[number] = session
            return self._encode_opening(await _checked(session.open(), Opening))
        if stage == "step":
            step = self._sessions[number].step(request.head["completion"])
            return self._encode_observation(await _checked(step, Observation))
        session_to_close = self._sessions.pop(number, None)
        if session_to_close is not None:
            await session_to_close.close()
        return {}, ()

    def _encode_opening(self, opening: Opening) -> Answer:
        header, contents = self._encode_replies(opening.messages)
        header["replaces_prompt"] = opening.replaces_prompt
        header["tools"] = format_json(list(opening.tools)) if opening.tools else ""
        return header, contents

    def _encode_observation(self, observation: Observation) -> Answer:
        replies = () if observation.is_over else observation.replies
        header, contents = self._encode_replies(replies)
        header |= {"is_over": observation.is_over, "reward": observation.reward}
        return header, contents

    def _encode_replies(self, replies: Sequence[Reply]) -> tuple[dict[str, Any], list[bytes]]:
        return encode_replies(
            replies,
            max_item_bytes=self._setup["max_item_bytes"],
            max_reply_bytes=self._setup["max_reply_bytes"],
        )


async def _checked(work: Awaitable[Any], kind: type) -> Any:
    result = await work
    if not isinstance(result, kind):
        raise TypeError(f"the adapter returned {type(result).__name__}, not {kind.__name__}")
    return result


def _read_task(request: Frame) -> Task:
    return Task(
        sample_id=request.head["sample_id"],
        seed=request.head["seed"],
        messages=request.head["messages"],
        answer=request.head["answer"],
        metadata=parse_json(request.head["metadata"]),
        files=request.contents,
    )


def describe_error(error: BaseException) -> str:
    """Return an error of foreign code with the line that raised it."""
    if isinstance(error, RelaxError):
        return str(error)[:MAX_ERROR_CHARACTERS]
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"raised {type(error).__name__}: {error}{where}"[:MAX_ERROR_CHARACTERS]


if __name__ == "__main__":
    sys.exit(main())
