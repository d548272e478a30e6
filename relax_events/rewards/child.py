"""A reward child: runs one reward function, one JSON line in, one JSON line out. Started by `RewardPool` alone.

The first line it writes says that it is ready, with the function's version, or why the function can't be loaded. Every further line
answers the request of the same rank. It ends as soon as its stdin does, even in the middle of a call.
"""

from __future__ import annotations

import os
import queue
import resource
import sys
import threading
import time
import traceback
from typing import Any, BinaryIO

import orjson

from relax_events.errors import RelaxError
from relax_events.rewards.hub import LoadedReward, as_score, load_reward


def main(name: str, memory_bytes: int) -> int:
    """Load the function and answer requests until stdin ends."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # What user code prints must not get between the answers.
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    try:
        reward = load_reward(name)
    except (RelaxError, MemoryError) as error:
        _send(answers, {"load_error": str(error) or f"reward function {name} needs more than reward.memory_bytes = {memory_bytes} to load"})
        return 2
    _send(answers, {"digest": reward.digest})
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests,), daemon=True).start()
    while True:
        _send(answers, _answer(reward, orjson.loads(requests.get())))


def _read(requests: queue.SimpleQueue[bytes]) -> None:
    for line in sys.stdin.buffer:
        requests.put(line)
    os._exit(0)  # The parent closed the pipe or died; a call that hangs must not outlive it.


def _answer(reward: LoadedReward, request: dict[str, Any]) -> dict[str, Any]:
    started = time.perf_counter()
    try:
        value = reward.function(request["completion"], answer=request["answer"], metadata=orjson.loads(request["metadata"]), prompt=request["prompt"])
    except BaseException as error:  # User code may raise anything, SystemExit too; the parent counts it against this sample alone.
        return {"error": _describe(error), "seconds": time.perf_counter() - started}
    seconds = time.perf_counter() - started
    try:
        score = as_score(value)
    except (TypeError, ValueError) as error:
        return {"error": str(error), "seconds": seconds}
    return {"reward": score.reward, "components": score.components, "seconds": seconds}


def _describe(error: BaseException) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"raised {type(error).__name__}: {error} ({place.filename}:{place.lineno})"


def _send(answers: BinaryIO, value: dict[str, Any]) -> None:
    answers.write(orjson.dumps(value) + b"\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
