"""Runs a reward function in child processes, so that one that hangs, leaks or crashes costs one sample and never the worker."""

from __future__ import annotations

import contextlib
import math
import selectors
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import orjson

from relax_events.config import RewardConfig
from relax_events.errors import ConfigError, RewardError
from relax_events.rewards.hub import Score
from relax_events.rewards.process import START_SECONDS, Request, RewardChild

MAX_REQUESTS_PER_CHILD = 64


@dataclass(frozen=True, slots=True)
class RewardItem:
    """A completion to be scored; `metadata` is a JSON object as text."""

    sample_id: str
    completion: str
    answer: str = ""
    metadata: str = "{}"
    prompt: str = ""


class RewardPool:
    """Scores completions in `reward.processes` child processes.

    A call that takes longer than `reward.timeout_seconds` is killed with its child, another child takes its place, and the calls that
    waited behind it are asked again. The children speak JSON lines over pipes and end with the parent, however it ends.
    Use it as a context manager, from one thread.
    """

    def __init__(self, config: RewardConfig) -> None:
        """Start the children and wait until all have loaded the function.

        Raises:
            ConfigError: The function can't be loaded; the text says why.
        """
        self._config = config
        self._selector = selectors.DefaultSelector()
        self._children: list[RewardChild] = []
        self._waiting: deque[Request] = deque()
        self._results: dict[int, Score | RewardError] = {}
        self._items: Sequence[RewardItem] = ()
        self.name = config.function
        self.digest = ""
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self.close)
            for _ in range(config.processes):
                self._start_child()
            while any(child.digest is None for child in self._children):
                self._turn(window=0)
            on_failure.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def score_batch(self, items: Sequence[RewardItem]) -> list[Score | RewardError]:
        """Score completions, in parallel, and give the results in the order of the items.

        A call that raises, hangs, dies or returns no finite number gives a `RewardError` in its place; the others are not affected.

        Raises:
            ConfigError: A child had to be started again and could not load the function, or found another version of it.
        """
        self._items = items
        self._results = {}
        self._waiting = deque(Request(index, _line(item)) for index, item in enumerate(items))
        window = min(MAX_REQUESTS_PER_CHILD, math.ceil(len(items) / (4 * self._config.processes)))
        while len(self._results) < len(items):
            self._turn(window=window)
        return [self._results[index] for index in range(len(items))]

    def close(self, *, timeout_seconds: float = 2.0) -> None:
        """End all children within the deadline; calls that still run are cut off."""
        deadline = time.monotonic() + timeout_seconds
        for child in self._children:
            child.close(timeout_seconds=max(0.0, deadline - time.monotonic()))
        self._children.clear()
        self._selector.close()

    def _turn(self, *, window: int) -> None:
        """Give out requests, wait for the next answer or deadline, and deal with what came."""
        for child in self._children:
            self._feed(child, window)
        deadlines = [child.deadline for child in self._children if child.deadline is not None]
        for key, mask in self._selector.select(max(0.0, min(deadlines) - time.monotonic()) if deadlines else None):
            if mask & selectors.EVENT_WRITE:
                key.data.write()
            if mask & selectors.EVENT_READ:
                self._hear(key.data)
        # After reading, so that a parent that was itself held up does not take its own delay for the child's.
        for child in [child for child in self._children if child.deadline is not None and child.deadline <= time.monotonic()]:
            self._replace(child, self._overdue_text(child))

    def _feed(self, child: RewardChild, window: int) -> None:
        if child.digest is not None and self._waiting and len(child.requests) <= window // 2:
            num_requests = min(window - len(child.requests), len(self._waiting))
            child.ask([self._waiting.popleft() for _ in range(num_requests)])
        if child.has_outgoing and child.stdin not in self._selector.get_map():
            self._selector.register(child.stdin, selectors.EVENT_WRITE, child)
        elif not child.has_outgoing and child.stdin in self._selector.get_map():
            self._selector.unregister(child.stdin)

    def _hear(self, child: RewardChild) -> None:
        was_ready = child.digest is not None
        answers = child.read()
        if answers is None:
            self._replace(child, "")
            return
        if not was_ready and child.digest is not None:
            self._check_version(child.digest)
        for request, answer in answers:
            self._results[request.index] = self._result(request, answer)

    def _check_version(self, digest: str) -> None:
        if self.digest and digest != self.digest:
            versions = f"version {self.digest[:12]}, now {digest[:12]}"
            raise ConfigError(f"reward function {self.name} changed during the run ({versions}); start the run again")
        self.digest = digest

    def _result(self, request: Request, answer: dict[str, Any]) -> Score | RewardError:
        if "error" in answer:
            return self._error(request, answer["error"])
        return Score(answer["reward"], answer["components"], answer["seconds"])

    def _error(self, request: Request, text: str) -> RewardError:
        return RewardError(f"reward function {self.name} {text} on sample {self._items[request.index].sample_id}")

    def _overdue_text(self, child: RewardChild) -> str:
        if child.digest is None:
            return f"took longer than {START_SECONDS:g} s to load"
        return f"took longer than {self._config.timeout_seconds:g} s (reward.timeout_seconds)"

    def _replace(self, child: RewardChild, text: str) -> None:
        """Start another child for one that hangs or died, count its oldest call as failed and ask the others again."""
        for pipe in (child.stdin, child.stdout):
            if pipe in self._selector.get_map():
                self._selector.unregister(pipe)
        self._children.remove(child)
        ending = child.kill()
        text = text or f"died ({ending})"
        if child.digest is None:
            raise ConfigError(f"reward function {self.name} {text} before it was loaded; see reward.function and reward.memory_bytes")
        if child.requests:
            failed = child.requests.popleft()
            self._results[failed.index] = self._error(failed, text)
            self._waiting.extendleft(reversed(child.requests))
        self._start_child()

    def _start_child(self) -> None:
        child = RewardChild(self._config)
        self._children.append(child)
        self._selector.register(child.stdout, selectors.EVENT_READ, child)


def _line(item: RewardItem) -> bytes:
    request = {"completion": item.completion, "answer": item.answer, "metadata": item.metadata, "prompt": item.prompt}
    return orjson.dumps(request) + b"\n"
