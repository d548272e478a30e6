"""Child process of stateful environments: holds the sessions of many samples. Started only by
`SessionPool`.

    stdin   open, step, close: a line of JSON with the session's number, then its files
    stdout  the answer with the request's number; a tick each second while the process is well

Each stage has its deadline. An environment of ordinary functions runs one call at a time; a call
that is late can't be stopped, so the process answers and exits, and its other sessions are lost.
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
from itertools import accumulate, pairwise
from typing import Any

import orjson

from relax_events.environments.interfaces import load_adapter
from relax_events.environments.interfaces.protocol import (
    Adapter,
    Observation,
    Opening,
    Session,
    Task,
)
from relax_events.environments.reply import Reply
from relax_events.environments.reply_encoding import encode_reply
from relax_events.errors import PoisonSample, RelaxError
from relax_events.runtime.subprocess_rpc import LENGTHS, begin_child, read_requests, respond

TICK_SECONDS = 1.0
EXIT_SECONDS = 1.0
MAX_ERROR_CHARACTERS = 600
ANSWER = tuple[dict[str, Any], Sequence[bytes]]


def main() -> int:
    """Serve until stdin ends: report the loaded adapter, then answer requests."""
    answers, requests, setup = begin_child()
    try:
        adapter = load_adapter(setup)
    except (RelaxError, MemoryError) as error:
        limit = f"environment.memory_bytes = {setup['memory_bytes']}"
        respond(answers, {"load_error": str(error) or f"it needs more than {limit} to load"})
        return 2
    respond(answers, {"takes_files": adapter.takes_files})
    server = SessionServer(adapter, setup, answers)
    asyncio.run(server.serve(requests))
    sys.stderr.flush()
    os._exit(0)  # a thread of foreign code may still run


class SessionServer:
    """Answers the requests of one child process."""

    def __init__(self, adapter: Adapter, setup: dict[str, Any], answers: Any) -> None:
        """Serve the sessions of an adapter.

        Args:
            adapter: The loaded interface.
            setup: The section `environment`, with `max_item_bytes`.
            answers: The stream to the worker.
        """
        self._adapter, self._setup, self._answers = adapter, setup, answers
        self._sessions: dict[int, Session] = {}
        self._turn_of_process = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._running: dict[int, asyncio.Task[None]] = {}
        self._seconds = {
            "open": setup["setup_seconds"],
            "step": setup["timeout_seconds"],
            "close": setup["finish_seconds"],
        }

    async def serve(self, requests: Any) -> None:
        """Answer until the requests end; then close all sessions within the deadline."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def read() -> None:
            for question, content in read_requests(requests):
                loop.call_soon_threadsafe(self._start, question, content)
            loop.call_soon_threadsafe(ended.set)
            time.sleep(self._seconds["close"] + EXIT_SECONDS)
            os._exit(1)  # the loop, or a thread, is stuck in foreign code

        threading.Thread(target=read, daemon=True, name="requests").start()
        while not ended.is_set():
            respond(self._answers, {"tick": True})
            with suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), TICK_SECONDS)
        for task in self._running.values():
            task.cancel()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._close_all(), self._seconds["close"])

    async def _close_all(self) -> None:
        await asyncio.gather(*self._tasks, return_exceptions=True)
        closing = [session.close() for session in self._sessions.values()]
        await asyncio.gather(*closing, return_exceptions=True)

    def _start(self, question: dict[str, Any], content: bytes) -> None:
        number = question["session"]
        if question["op"] == "close" and self._adapter.is_concurrent and number in self._running:
            self._running[number].cancel()  # the worker no longer waits for it
        task = asyncio.get_running_loop().create_task(self._answer(question, content))
        self._tasks.add(task)
        if question["op"] != "close":
            self._running[number] = task
            task.add_done_callback(lambda _: self._running.pop(number, None))
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, question: dict[str, Any], content: bytes) -> None:
        is_stuck = False
        try:
            answer, contents = await self._within_deadline(question, content)
        except TimeoutError:
            stage = question["op"]
            is_stuck = not self._adapter.is_concurrent
            answer, contents = {"failed": f"took longer than {self._limit(stage)}"}, ()
        except PoisonSample as error:
            answer, contents = {"invalid": str(error)[:MAX_ERROR_CHARACTERS]}, ()
        except Exception as error:  # foreign code may raise any exception
            answer, contents = {"failed": describe_error(error)}, ()
        answer |= {"number": question["number"], "ends": is_stuck}
        respond(self._answers, answer, contents)
        if is_stuck:
            os._exit(3)

    def _limit(self, stage: str) -> str:
        key = {"open": "setup_seconds", "step": "timeout_seconds", "close": "finish_seconds"}[stage]
        return f"{self._seconds[stage]:g} s (environment.{key})"

    async def _within_deadline(self, question: dict[str, Any], content: bytes) -> ANSWER:
        work = self._call(question, content)
        if self._adapter.is_concurrent:
            return await asyncio.wait_for(work, self._seconds[question["op"]])
        async with self._turn_of_process:
            return await asyncio.wait_for(work, self._seconds[question["op"]])

    async def _call(self, question: dict[str, Any], content: bytes) -> ANSWER:
        number, stage = question["session"], question["op"]
        if stage == "open":
            session = self._adapter.begin(_read_task(question, content))
            self._sessions[number] = session
            return self._encode_opening(await _checked(session.open(), Opening))
        if stage == "step":
            step = self._sessions[number].step(question["completion"])
            return self._encode_observation(await _checked(step, Observation))
        session_to_close = self._sessions.pop(number, None)
        if session_to_close is not None:
            await session_to_close.close()
        return {}, ()

    def _encode_opening(self, opening: Opening) -> ANSWER:
        header, contents = self._encode_replies(opening.messages)
        header["replaces_prompt"] = opening.replaces_prompt
        header["tools"] = orjson.dumps(list(opening.tools)).decode() if opening.tools else ""
        return header, contents

    def _encode_observation(self, observation: Observation) -> ANSWER:
        replies = () if observation.is_over else observation.replies
        header, contents = self._encode_replies(replies)
        header |= {"is_over": observation.is_over, "reward": observation.reward}
        return header, contents

    def _encode_replies(self, replies: Sequence[Reply]) -> tuple[dict[str, Any], list[bytes]]:
        """Encode replies one after another.

        Raises:
            PoisonSample: One is invalid.
        """
        headers: list[dict[str, Any]] = []
        contents: list[bytes] = []
        for reply in replies:
            header, files = encode_reply(reply, self._setup["max_item_bytes"])
            if "error" in header:
                raise PoisonSample(header["error"])
            headers.append(header["reply"])
            contents += files
        return {"replies": headers}, contents


async def _checked(work: Awaitable[Any], kind: type) -> Any:
    result = await work
    if not isinstance(result, kind):
        raise TypeError(f"the adapter returned {type(result).__name__}, not {kind.__name__}")
    return result


def _read_task(question: dict[str, Any], content: bytes) -> Task:
    bounds = pairwise(accumulate(question[LENGTHS], initial=0))
    return Task(
        sample_id=question["sample_id"],
        seed=question["seed"],
        messages=question["messages"],
        answer=question["answer"],
        metadata=orjson.loads(question["metadata"]),
        files=[content[start:end] for start, end in bounds],
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
