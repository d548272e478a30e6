"""Run reward functions in a child process of `RewardPool`: one JSON line in, one JSON line out.

The first input line names the function; the first output line reports that it is ready, with its
version and call signature, or why it can't be loaded. Every further output line responds to the
input line of the same number. The process exits as soon as its stdin closes, even during a call.
"""

from __future__ import annotations

import asyncio
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

import orjson

from relax_events.errors import RelaxError
from relax_events.rewards.by_source import RewardRoutes, load_routes
from relax_events.rewards.code_version import file_stamps
from relax_events.rewards.scores import BY_TOKEN, BY_TURN, parse_score
from relax_events.runtime.subprocess_rpc import begin_child

MAX_ERROR_CHARACTERS = 600


def main() -> int:
    """Load the function and process requests until stdin closes."""
    answers, requests, setup = begin_child(buffering=0)
    try:
        routes = load_routes(setup)
    except (RelaxError, MemoryError) as error:
        needs = (
            f"reward function {setup['function']} needs more than reward.memory_bytes = "
            f"{setup['memory_bytes']} to load"
        )
        _send(answers, {"load_error": str(error) or needs})
        return 2
    caller = Caller(routes, timeout_seconds=setup["timeout_seconds"])
    ready = {
        "digest": routes.digest,
        "takes_prompt_group": routes.takes_prompt_group,
        "is_async": routes.is_async,
        "optional_arguments": routes.optional_arguments,
    }
    _send(answers, ready | {"files": file_stamps(routes.files)})
    if routes.is_async:
        asyncio.run(
            _serve_concurrently(caller, requests, answers, concurrency=setup["concurrency"])
        )
    _serve(caller, requests, answers)
    return 0


def _serve(caller: Caller, requests: BinaryIO, answers: BinaryIO) -> None:
    """Process one request after the other."""
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests, lines.put), daemon=True).start()
    while True:
        _send(answers, caller.respond(orjson.loads(lines.get())))


async def _serve_concurrently(
    caller: Caller, requests: BinaryIO, answers: BinaryIO, *, concurrency: int
) -> None:
    """Run up to `concurrency` calls at a time; the responses keep the order of the requests."""
    loop, slots = asyncio.get_running_loop(), asyncio.Semaphore(concurrency)
    calls: asyncio.Queue[asyncio.Task[dict[str, Any]]] = asyncio.Queue()

    async def call(line: bytes) -> dict[str, Any]:
        async with slots:
            return await caller.respond_async(orjson.loads(line))

    def begin(line: bytes) -> None:
        calls.put_nowait(loop.create_task(call(line)))

    threading.Thread(
        target=_read,
        args=(requests, lambda line: loop.call_soon_threadsafe(begin, line)),
        daemon=True,
    ).start()
    while True:
        _send(answers, await (await calls.get()))


def _read(requests: BinaryIO, take: Callable[[bytes], object]) -> None:
    for line in requests:
        take(line)
    os._exit(0)  # The parent closed the pipe or died; a call that hangs must not outlive it.


class Caller:
    """Calls the function of a request, and turns the result or the error into a response."""

    def __init__(self, routes: RewardRoutes, *, timeout_seconds: float) -> None:
        self._routes, self._timeout_seconds = routes, timeout_seconds

    def respond(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the response to a request; any exception of the function becomes an error
        response.
        """
        started = time.perf_counter()
        try:
            value = self._call(request)
        # User code may raise anything, SystemExit too; the parent counts it against this call
        # alone.
        except BaseException as error:
            return _failure(error, started)
        return self._success(value, request, started)

    async def respond_async(self, request: dict[str, Any]) -> dict[str, Any]:
        """Do the same for an `async def`. Its time limit is enforced here, because the parent sees
        only the oldest of several calls.
        """
        started = time.perf_counter()
        clock = asyncio.timeout(self._timeout_seconds)
        try:
            async with clock:
                value = await self._call(request)
        except BaseException as error:  # As above.
            late = f"took longer than {self._timeout_seconds:g} s (reward.timeout_seconds)"
            return (
                {"error": late, "seconds": self._timeout_seconds}
                if clock.expired()
                else _failure(error, started)
            )
        return self._success(value, request, started)

    def _call(self, request: dict[str, Any]) -> Any:
        completions, metadata = request["completions"], orjson.loads(request["metadata"])
        reward, takes_all = self._routes.reward_for(metadata), self._routes.takes_prompt_group
        first = completions if takes_all else completions[0]
        more = {
            name: request[name] if takes_all else request[name][0]
            for name in reward.optional_arguments
        }
        given = {"answer": request["answer"], "metadata": metadata, "prompt": request["prompt"]}
        return reward.function(
            first, **{name: given[name] for name in reward.named_arguments}, **more
        )

    def _success(self, value: Any, request: dict[str, Any], started: float) -> dict[str, Any]:
        seconds = time.perf_counter() - started
        num_samples = len(request["completions"])
        values = value if self._routes.takes_prompt_group else [value]
        if not isinstance(values, list | tuple) or len(values) != num_samples:
            found = (
                f"{len(values)} elements"
                if isinstance(values, list | tuple)
                else type(values).__name__
            )
            return {
                "error": (
                    f"returned {found}; for a prompt group of {num_samples} samples it must "
                    f"return a list of {num_samples}"
                ),
                "seconds": seconds,
            }
        weights = self._routes.reward_for(orjson.loads(request["metadata"])).weights
        return {"results": [_result(one, weights) for one in values], "seconds": seconds}


def _result(value: Any, weights: Mapping[str, float]) -> dict[str, Any]:
    if isinstance(value, Exception):
        return {"error": f"failed: {value}"[:MAX_ERROR_CHARACTERS]}
    try:
        score = parse_score(value, weights=weights)
    except (TypeError, ValueError, OverflowError) as error:
        return {"error": str(error)}
    parts = {BY_TURN: score.turn_rewards, BY_TOKEN: score.token_rewards}
    return {"reward": score.reward, "components": score.components} | {
        name: given for name, given in parts.items() if given is not None
    }


def _failure(error: BaseException, started: float) -> dict[str, Any]:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    kind, where = type(error).__name__, f"{frame.filename}:{frame.lineno}"
    text = (
        f"failed: {error}" if isinstance(error, RelaxError) else f"raised {kind}: {error} ({where})"
    )
    if len(text) > MAX_ERROR_CHARACTERS:
        text = f"{text[:MAX_ERROR_CHARACTERS]}..."
    return {
        "error": text,
        "is_exhausted": isinstance(error, MemoryError),
        "seconds": time.perf_counter() - started,
    }


def _send(answers: BinaryIO, value: dict[str, Any]) -> None:
    line = memoryview(orjson.dumps(value) + b"\n")
    while line:
        line = line[answers.write(line) :]


if __name__ == "__main__":
    sys.exit(main())
