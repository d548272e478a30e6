"""Run reward functions in child processes, so that a hang, leak or crash costs one call and not the
worker.
"""

from __future__ import annotations

import contextlib
import math
import selectors
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from types import TracebackType
from typing import Any, Self

import numpy as np
import orjson
from numpy.typing import NDArray

from relax_events.config import RewardConfig
from relax_events.data.conversations import ASSISTANT
from relax_events.errors import ConfigError, RewardError
from relax_events.events.immutable import immutable
from relax_events.rewards.code_version import file_stamps
from relax_events.rewards.process import START_SECONDS, ChildReady, Request, RewardChild
from relax_events.rewards.scores import BY_TOKEN, BY_TURN, Score

MAX_REQUESTS_PER_CHILD = 64


@immutable(frozen=True, slots=True)
class RewardItem:
    """A completion to score; `metadata` is a JSON object as text. Items of one prompt group are
    adjacent and share its id.

    `turns` are role and text of each message from the first completion on; empty for a single
    completion. `token_ids` are the ids of the sampled tokens. `environment_rewards` are what a
    stateful environment gave to each turn.
    """

    sample_id: str
    completion: str
    answer: str = ""
    metadata: str = "{}"
    prompt: str = ""
    prompt_group_id: str = ""
    turns: Sequence[tuple[str, str]] = ()
    token_ids: NDArray[np.generic] | None = None
    environment_rewards: Sequence[float] = ()


class RewardPool:
    """Scores completions in `reward.processes` child processes.

    A call that exceeds `reward.timeout_seconds` is killed with its child; a new child replaces it,
    and the calls behind it are retried. If several calls were in flight in the child, each is
    retried alone, and only the one that fails again counts as failed. The children exchange JSON
    lines over pipes and exit with the parent. Use it as a context manager, from one thread.
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
        self._ready: ChildReady | None = None
        self.name = "; ".join(
            [
                config.function,
                *(
                    f"{source}: {chosen.function}"
                    for source, chosen in sorted(config.routes.items())
                ),
            ]
        )
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self.close)
            for _ in range(config.num_processes):
                self._start_child()
            while any(child.ready is None for child in self._children):
                self._step(window=0)
            on_failure.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def digest(self) -> str:
        """The version of the function with its options."""
        return self._loaded.digest

    @property
    def takes_prompt_group(self) -> bool:
        """Whether the function scores whole prompt groups: then all items of a group must be
        adjacent in one batch.
        """
        return self._loaded.takes_prompt_group

    @property
    def optional_arguments(self) -> list[str]:
        """Names of the optional arguments that the function takes, such as `turns`."""
        return self._loaded.optional_arguments

    @property
    def _loaded(self) -> ChildReady:
        assert self._ready is not None
        return self._ready

    @property
    def max_response_seconds(self) -> float:
        """The longest time between two responses: a call that hangs, its retry in another child,
        and loading both.
        """
        return 2 * (self._config.timeout_seconds + START_SECONDS)

    def score_batch(
        self, items: Sequence[RewardItem], *, on_answer: Callable[[], None] = lambda: None
    ) -> list[Score | RewardError]:
        """Score completions in parallel, and return the results in the order of the items.

        A call that raises, hangs, dies or returns no finite number gives a `RewardError`; the
        others are not affected. If the function takes prompt groups, a call scores one prompt
        group.

        Args:
            items: The completions.
            on_answer: Called when responses have arrived, errors included.
        Raises:
            ConfigError: The function changed on the disk, or a restarted child could not load it.
        """
        self._reload_changed_files()
        self._items = items
        self._results = {}
        self._waiting = deque(self._requests(items))
        window = min(
            MAX_REQUESTS_PER_CHILD, math.ceil(len(self._waiting) / (4 * self._config.num_processes))
        )
        if self._loaded.is_async:
            window = 2 * self._config.concurrency
        while len(self._results) < len(items):
            num_answered = len(self._results)
            self._step(window=window)
            if len(self._results) > num_answered:
                on_answer()
        return [self._results[index] for index in range(len(items))]

    def close(self, *, timeout_seconds: float = 2.0) -> None:
        """End all children within the deadline; running calls are killed."""
        deadline = time.monotonic() + timeout_seconds
        for child in self._children:
            child.close(timeout_seconds=max(0.0, deadline - time.monotonic()))
        self._children.clear()
        self._selector.close()

    def _reload_changed_files(self) -> None:
        """Restart the children if the function's files changed; `_check_version` rejects another
        version.
        """
        if file_stamps(self._loaded.files) == self._loaded.files:
            return
        for child in list(self._children):
            self._restart_child(child, [])
        while any(child.ready is None for child in self._children):
            self._step(window=0)

    def _requests(self, items: Sequence[RewardItem]) -> Iterable[Request]:
        if not self._loaded.takes_prompt_group:
            return (
                Request((index,), _encode_request([item], self.optional_arguments))
                for index, item in enumerate(items)
            )
        prompt_groups = groupby(enumerate(items), key=lambda numbered: numbered[1].prompt_group_id)
        return (
            _build_request(list(numbered), self.optional_arguments) for _, numbered in prompt_groups
        )

    def _step(self, *, window: int) -> None:
        """Send requests, wait for the next response or deadline, and handle it."""
        for child in self._children:
            self._send_waiting(child, window)
        deadlines = [child.deadline for child in self._children if child.deadline is not None]
        for key, mask in self._selector.select(
            max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
        ):
            if mask & selectors.EVENT_WRITE:
                key.data.write()
            if mask & selectors.EVENT_READ:
                self._read_responses(key.data)
        # After reading, so that a delay of the parent does not count as the child's.
        for child in [
            child
            for child in self._children
            if child.deadline is not None and child.deadline <= time.monotonic()
        ]:
            self._replace_failed_child(child, self._timeout_text(child))

    def _send_waiting(self, child: RewardChild, window: int) -> None:
        if (
            child.ready is not None
            and self._waiting
            and len(child.requests) <= window // 2
            and not child.is_isolating_suspect
        ):
            child.send(
                self._next_requests(window - len(child.requests), is_idle=not child.requests)
            )
        if child.has_outgoing and child.stdin not in self._selector.get_map():
            self._selector.register(child.stdin, selectors.EVENT_WRITE, child)
        elif not child.has_outgoing and child.stdin in self._selector.get_map():
            self._selector.unregister(child.stdin)

    def _next_requests(self, limit: int, *, is_idle: bool) -> list[Request]:
        """Take requests from the front; a suspect request goes alone to an idle child."""
        if self._waiting[0].is_suspect:
            return [self._waiting.popleft()] if is_idle else []
        requests: list[Request] = []
        while self._waiting and len(requests) < limit and not self._waiting[0].is_suspect:
            requests.append(self._waiting.popleft())
        return requests

    def _read_responses(self, child: RewardChild) -> None:
        was_ready = child.ready is not None
        answers = child.read()
        if answers is None:
            self._replace_failed_child(child, "")
            return
        if not was_ready and child.ready is not None:
            self._check_version(child.ready)
        retried: list[Request] = []
        for request, answer in answers:
            child.num_answered += 1
            if answer.get("is_exhausted") and child.num_answered > 1:
                retried.append(
                    request
                )  # earlier calls may have leaked memory; retry it as the first call of a new child
            else:
                self._store_results(request, answer)
        if any(answer.get("is_exhausted") for _, answer in answers):
            self._restart_child(child, retried)

    def _check_version(self, ready: ChildReady) -> None:
        if self._ready is not None and ready.digest != self._ready.digest:
            versions = f"version {self._ready.digest[:12]}, now {ready.digest[:12]}"
            raise ConfigError(
                f"reward function {self.name} changed during the run ({versions}); start the "
                "run again"
            )
        self._ready = ready

    def _store_results(self, request: Request, answer: dict[str, Any]) -> None:
        """Store the results of a call, or its error for each of its samples."""
        seconds = answer["seconds"] / len(request.indices)
        results = answer.get("results") or [answer] * len(request.indices)
        for index, result in zip(request.indices, results, strict=True):
            if "error" in result:
                self._results[index] = self._error(index, result["error"])
            else:
                by_turn, by_token = (
                    tuple(result[name]) if name in result else None for name in (BY_TURN, BY_TOKEN)
                )
                self._results[index] = Score(
                    result["reward"], result["components"], seconds, by_turn, by_token
                )

    def _error(self, index: int, text: str) -> RewardError:
        return RewardError(
            f"reward function {self.name} {text} on sample {self._items[index].sample_id}"
        )

    def _fail(self, request: Request, text: str) -> None:
        for index in request.indices:
            self._results[index] = self._error(index, text)

    def _timeout_text(self, child: RewardChild) -> str:
        if child.ready is None:
            return f"took longer than {START_SECONDS:g} s to load"
        return f"took longer than {self._config.timeout_seconds:g} s (reward.timeout_seconds)"

    def _restart_child(self, child: RewardChild, retried: list[Request]) -> None:
        """Replace a child that is out of memory."""
        retried += child.requests
        self._kill_child(child)
        self._waiting.extendleft(reversed(retried))
        self._start_child()

    def _replace_failed_child(self, child: RewardChild, text: str) -> None:
        """Replace a child that hung or died, fail or isolate its call, and retry the others."""
        ending = self._kill_child(child)
        text = text or f"died ({ending})"
        if child.ready is None:
            raise ConfigError(
                f"reward function {self.name} {text} before it was loaded; see "
                "reward.function and reward.memory_bytes"
            )
        retried = list(child.requests)
        if child.ready.is_async and len(retried) > 1:
            retried = [replace(request, is_suspect=True) for request in retried]
        elif retried:
            self._fail(retried.pop(0), text)
        self._waiting.extendleft(reversed(retried))
        self._start_child()

    def _kill_child(self, child: RewardChild) -> str:
        for pipe in (child.stdin, child.stdout):
            if pipe in self._selector.get_map():
                self._selector.unregister(pipe)
        self._children.remove(child)
        return child.kill()

    def _start_child(self) -> None:
        child = RewardChild(self._config)
        self._children.append(child)
        self._selector.register(child.stdout, selectors.EVENT_READ, child)


def _build_request(
    numbered: Sequence[tuple[int, RewardItem]], optional_arguments: Sequence[str]
) -> Request:
    return Request(
        tuple(index for index, _ in numbered),
        _encode_request([item for _, item in numbered], optional_arguments),
    )


def _encode_request(items: Sequence[RewardItem], optional_arguments: Sequence[str]) -> bytes:
    first = items[0]
    request = {
        "completions": [item.completion for item in items],
        "answer": first.answer,
        "metadata": first.metadata,
        "prompt": first.prompt,
    }
    more = {name: [SERIALIZERS[name](item) for item in items] for name in optional_arguments}
    return orjson.dumps(request | more) + b"\n"


def _turns(item: RewardItem) -> list[dict[str, str]]:
    return [
        {"role": role, "content": text}
        for role, text in item.turns or ((ASSISTANT, item.completion),)
    ]


def _token_ids(item: RewardItem) -> list[int]:
    return [] if item.token_ids is None else list(map(int, item.token_ids.tolist()))


SERIALIZERS: dict[str, Callable[[RewardItem], object]] = {
    "turns": _turns,
    "token_ids": _token_ids,
    "environment_rewards": lambda item: list(item.environment_rewards),
}
