"""Run reward functions in a child process of `RewardPool`.

The setup names the functions; the first message has their versions and call signature, or why
they can't be loaded. The process of a built-in verifier that raised is replaced: the text that it
read may have changed it.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import relax_events
from relax_events.confinement.frames import Frame
from relax_events.confinement.served import (
    IS_CONCURRENT,
    MAX_IN_FLIGHT,
    RENEW,
    REPLACE,
    RETRY,
    Served,
)
from relax_events.errors import RelaxError
from relax_events.events.json_text import parse_json
from relax_events.rewards.by_source import RewardRoutes, load_routes
from relax_events.rewards.code_version import file_stamps
from relax_events.rewards.registry import read_info
from relax_events.rewards.scores import BY_TOKEN, BY_TURN, EXPLAINS, parse_score

MAX_ERROR_CHARACTERS = 600
NO_REWARD = (
    "returned None, so the sample has no reward and is not trained; return a number, or let "
    "reward.routes choose the function by the row's source"
)


MAX_REQUESTS = 64
OUR_CODE = Path(relax_events.__file__).parent


def main() -> int:
    """Load the functions and process requests until stdin closes."""
    served = Served()
    setup = served.setup
    try:
        routes = load_routes(setup)
    except (RelaxError, MemoryError) as error:
        needs = (
            f"reward function {setup['function']} needs more than reward.memory_bytes = "
            f"{setup['memory_bytes']} to load"
        )
        served.report_load_error(str(error) or needs)
        return 2
    served.report_ready(
        {
            "name": next(iter(routes.rewards.values())).name,
            "digests": routes.digests,
            "takes_prompt_group": routes.takes_prompt_group,
            "optional_arguments": routes.optional_arguments,
            "files": file_stamps(routes.files),
            IS_CONCURRENT: routes.is_async,
            MAX_IN_FLIGHT: setup["concurrency"] if routes.is_async else MAX_REQUESTS,
        }
    )
    caller = Caller(
        routes, timeout_seconds=setup["timeout_seconds"], is_disposable=setup["is_disposable"]
    )
    if routes.is_async:
        asyncio.run(_serve_concurrently(caller, served))
    served.serve(lambda request: (caller.respond(request.head), ()))
    return 0


async def _serve_concurrently(caller: Caller, served: Served) -> None:
    """Run the calls as they come, until there are no more."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    calls: set[asyncio.Task[None]] = set()

    async def call(request: Frame) -> None:
        served.answer(request.number, await caller.respond_async(request.head))

    def begin(request: Frame) -> None:
        calls.add(task := loop.create_task(call(request)))
        task.add_done_callback(calls.discard)

    def read() -> None:
        for request in served.requests():
            loop.call_soon_threadsafe(begin, request)
        loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=read, daemon=True).start()
    await ended.wait()


class Caller:
    """Calls the function of a request, and turns the result or the error into a response."""

    def __init__(
        self, routes: RewardRoutes, *, timeout_seconds: float, is_disposable: bool
    ) -> None:
        self._routes, self._timeout_seconds = routes, timeout_seconds
        self._is_disposable = is_disposable

    def respond(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the response to a request; any exception of the function becomes an error
        response.
        """
        started = time.perf_counter()
        try:
            if request.get(EXPLAINS):
                return {"explanation": self._explain(request)}
            value = self._call(request)
        # User code may raise anything, SystemExit too; the parent counts it against this call
        # alone.
        except BaseException as error:
            return self._failure(error, started)
        return self._success(value, request, started)

    async def respond_async(self, request: dict[str, Any]) -> dict[str, Any]:
        """Do the same for an `async def`. Its time limit is enforced here, because the parent sees
        only the oldest of several calls.
        """
        if request.get(EXPLAINS):
            return self.respond(request)
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
                else self._failure(error, started)
            )
        return self._success(value, request, started)

    def _explain(self, request: dict[str, Any]) -> list[str | None] | None:
        """Return answer, location and reason of a reward; None if the function explains none."""
        metadata = parse_json(request["metadata"])
        loaded: Any = self._routes.reward_for(metadata).function
        options = loaded.keywords if isinstance(loaded, partial) else {}
        explain = read_info(getattr(loaded, "func", loaded)).explain
        if explain is None:
            return None
        explanation = explain(
            request["completions"][0],
            answer=request["answer"],
            metadata=metadata,
            prompt=request["prompt"],
            **options,
        )
        return [explanation.answer, explanation.location, explanation.why]

    def _failure(self, error: BaseException, started: float) -> dict[str, Any]:
        answer = {"error": describe_failure(error), "seconds": time.perf_counter() - started}
        if isinstance(error, MemoryError):
            answer[RENEW] = RETRY  # an earlier call may have leaked the memory
        elif self._is_disposable and not is_refusal(error):
            answer[RENEW] = REPLACE
        return answer

    def _call(self, request: dict[str, Any]) -> Any:
        completions, metadata = request["completions"], parse_json(request["metadata"])
        reward, takes_all = self._routes.reward_for(metadata), self._routes.takes_prompt_group
        first = completions if takes_all else completions[0]
        more = {
            name: request[name] if takes_all else request[name][0]
            for name in reward.optional_arguments
        }
        values = {"answer": request["answer"], "metadata": metadata, "prompt": request["prompt"]}
        return reward.function(
            first, **{name: values[name] for name in reward.named_arguments}, **more
        )

    def _success(self, value: Any, request: dict[str, Any], started: float) -> dict[str, Any]:
        seconds = time.perf_counter() - started
        num_samples = len(request["completions"])
        values = value if self._routes.takes_prompt_group else [value]
        if not isinstance(values, list | tuple) or len(values) != num_samples:
            description = (
                f"{len(values)} elements"
                if isinstance(values, list | tuple)
                else type(values).__name__
            )
            return {
                "error": (
                    f"returned {description}; for a prompt group of {num_samples} samples it must "
                    f"return a list of {num_samples}"
                ),
                "seconds": seconds,
            }
        weights = self._routes.reward_for(parse_json(request["metadata"])).weights
        return {"results": [_result(one, weights) for one in values], "seconds": seconds}


def _result(value: Any, weights: Mapping[str, float]) -> dict[str, Any]:
    if isinstance(value, Exception):
        return {"error": f"failed: {value}"[:MAX_ERROR_CHARACTERS]}
    if value is None:
        return {"error": NO_REWARD}
    try:
        score = parse_score(value, weights=weights)
    except (TypeError, ValueError, OverflowError) as error:
        return {"error": str(error)}
    parts = {BY_TURN: score.turn_rewards, BY_TOKEN: score.token_rewards}
    return {"reward": score.reward, "components": score.components} | {
        name: rewards for name, rewards in parts.items() if rewards is not None
    }


def is_refusal(error: BaseException) -> bool:
    """Return whether a verifier itself refused a row or a completion, so that nothing unexpected
    happened in the process.
    """
    raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
    is_ours = Path(raised_in).is_relative_to(OUR_CODE)
    return isinstance(error, RelaxError) or (isinstance(error, ValueError) and is_ours)


def describe_failure(error: BaseException) -> str:
    """Return an error of a reward function with the line that raised it."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    kind, where = type(error).__name__, f"{frame.filename}:{frame.lineno}"
    text = (
        f"failed: {error}" if isinstance(error, RelaxError) else f"raised {kind}: {error} ({where})"
    )
    return f"{text[:MAX_ERROR_CHARACTERS]}..." if len(text) > MAX_ERROR_CHARACTERS else text


if __name__ == "__main__":
    sys.exit(main())
