"""Run reward functions in child processes, so that a hang, leak or crash costs one call and not the
worker.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from relax_events.config import RewardConfig
from relax_events.confinement import ChildLost, ChildPool, ChildSettings, Profile
from relax_events.confinement.entry_points import find_reward
from relax_events.confinement.frames import FrameLimits
from relax_events.confinement.profiles import list_ports
from relax_events.confinement.requests import Request, Result
from relax_events.confinement.served import IS_CONCURRENT
from relax_events.confinement.settings import START_SECONDS
from relax_events.data.conversations import ASSISTANT
from relax_events.errors import ConfigError, RewardError
from relax_events.events.immutable import immutable
from relax_events.events.json_text import parse_json
from relax_events.rewards.by_source import combine_digests, require_same_form
from relax_events.rewards.code_version import file_stamps
from relax_events.rewards.registry import Explanation
from relax_events.rewards.scores import BY_TOKEN, BY_TURN, EXPLAINS, Score

ASYNC_GRACE_SECONDS = 1.0
"""For a child with several calls in flight, which keeps their deadlines itself."""
ANSWER_BYTES = 64 * 1024**2


@immutable(frozen=True, slots=True)
class RewardItem:
    """A completion to score; `metadata` is a JSON object as text. Items of one prompt group are
    adjacent and share its id.

    `turns` are role and text of each message from the first completion on; empty for a single
    completion. `token_ids` are the ids of the sampled tokens. `environment_rewards` are the rewards
    that a stateful environment gave to each turn.
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


@dataclass(slots=True)
class Call:
    """A call of a reward function: the positions of its items, and its request."""

    indices: tuple[int, ...]
    head: dict[str, Any]


class RewardPool:
    """Scores completions in `reward.processes` child processes.

    A call that exceeds `reward.timeout_seconds` is killed with its child; a new child replaces it,
    and the calls behind it are repeated. If several calls were in flight in the child, each is
    repeated alone, and only a call that fails again counts as failed. Functions of different
    confinement profiles run in different children. Use it as a context manager, from one thread.
    """

    def __init__(self, config: RewardConfig) -> None:
        """Start the children and wait until all have loaded the function.

        Raises:
            ConfigError: The function can't be loaded; the text says why.
        """
        self._config = config
        self.name = "; ".join(
            [
                config.function,
                *(
                    f"{source}: {chosen.function}"
                    for source, chosen in sorted(config.routes.items())
                ),
            ]
        )
        self._profiles = {
            source: find_reward(str(chosen.function)).profile
            for source, chosen in config.chosen.items()
        }
        self._pools = {
            profile: ChildPool(build_settings(config, self._profiles, profile))
            for profile in dict.fromkeys(self._profiles.values())
        }
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self.close)
            self._load(ChildPool.start)
            on_failure.pop_all()

    def _load(self, begin: Callable[[ChildPool], list[dict[str, Any]]]) -> None:
        """Start all children, and combine their functions' facts."""
        try:
            facts = [begin(pool)[0] for pool in self._pools.values()]
        except ChildLost as lost:
            raise self._load_error(lost) from None
        first = facts[0]
        for other in facts[1:]:
            require_same_form(_describe_form(first), _describe_form(other))
        self.takes_prompt_group: bool = first["takes_prompt_group"]
        """Whether the function scores whole prompt groups: then all items of a group must be
        adjacent in one batch."""
        self._is_async: bool = first[IS_CONCURRENT]
        self.optional_arguments = sorted(
            {name for one in facts for name in one["optional_arguments"]}
        )
        """Names of the optional arguments that the function takes, such as `turns`."""
        self._files: dict[str, list[int]] = {
            name: stamp for one in facts for name, stamp in one["files"].items()
        }
        digests = {source: digest for one in facts for source, digest in one["digests"].items()}
        self.digest = combine_digests(digests, self._config.route_key)
        """The version of the function with its options."""

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
        if file_stamps(self._files) != self._files:
            self._load(ChildPool.restart)
        done: SimpleQueue[tuple[Call, Result]] = SimpleQueue()
        calls = list(self._build_calls(items))
        self._submit(calls, done)
        results: dict[int, Score | RewardError] = {}
        num_left = len(calls)
        while num_left:
            for call, result in _take_all(done):
                results.update(self._read_result(call, result, items))
                num_left -= 1
            on_answer()
        return [results[index] for index in range(len(items))]

    def explain(self, item: RewardItem) -> Explanation | None:
        """Explain the reward of a completion; None if the function explains none, or sources have
        functions of their own.

        Raises:
            RewardError: The explanation fails, or is late.
        """
        if self._config.routes:
            return None
        call = Call((0,), _build_head([item], ()) | {EXPLAINS: True})
        pool = self._pools[self._find_profile(call)]
        try:
            reply = pool.call(call.head, seconds=self._config.timeout_seconds).result()
        except ChildLost as lost:
            text = lost.describe("reward.timeout_seconds")
            raise RewardError(f"the explanation of {self.name} {text}") from None
        if "error" in reply.head:
            raise RewardError(f"the explanation of {self.name} {reply.head['error']}")
        explanation = reply.head["explanation"]
        if explanation is None:
            return None
        answer, location, why = explanation
        return Explanation(answer=answer, location=location, why=why)

    def close(self) -> None:
        """End all children; running calls are killed."""
        for pool in self._pools.values():
            pool.close()

    def _build_calls(self, items: Sequence[RewardItem]) -> Iterable[Call]:
        if not self.takes_prompt_group:
            return (
                Call((index,), _build_head([item], self.optional_arguments))
                for index, item in enumerate(items)
            )
        prompt_groups = groupby(enumerate(items), key=lambda numbered: numbered[1].prompt_group_id)
        return (
            _build_group_call(list(numbered), self.optional_arguments)
            for _, numbered in prompt_groups
        )

    def _submit(self, calls: Sequence[Call], done: SimpleQueue[tuple[Call, Result]]) -> None:
        """Give each call to the children of its function's profile."""
        seconds = self._config.timeout_seconds + (ASYNC_GRACE_SECONDS if self._is_async else 0.0)
        requests: dict[Profile, list[Request]] = {profile: [] for profile in self._pools}
        for call in calls:
            request = Request(
                head=call.head,
                seconds=seconds,
                on_done=partial(_put, done, call),
            )
            requests[self._find_profile(call)].append(request)
        for profile, some in requests.items():
            self._pools[profile].submit(some)

    def _find_profile(self, call: Call) -> Profile:
        if len(self._pools) == 1:
            return next(iter(self._pools))
        metadata = parse_json(call.head["metadata"])
        return self._profiles[self._config.find_source(metadata)]

    def _read_result(
        self, call: Call, result: Result, items: Sequence[RewardItem]
    ) -> Iterator[tuple[int, Score | RewardError]]:
        """Yield the results of a call, or its error for each of its samples."""
        if isinstance(result, ChildLost):
            if not result.was_loaded:
                raise self._load_error(result)
            answer: dict[str, Any] = {
                "error": result.describe("reward.timeout_seconds"),
                "seconds": 0.0,
            }
        else:
            answer = result.head
        seconds = answer["seconds"] / len(call.indices)
        sample_results = answer.get("results") or [answer] * len(call.indices)
        for index, sample_result in zip(call.indices, sample_results, strict=True):
            yield index, self._read_score(sample_result, seconds, items[index])

    def _read_score(
        self, result: dict[str, Any], seconds: float, item: RewardItem
    ) -> Score | RewardError:
        if "error" in result:
            return RewardError(
                f"reward function {self.name} {result['error']} on sample {item.sample_id}"
            )
        by_turn, by_token = (
            tuple(result[name]) if name in result else None for name in (BY_TURN, BY_TOKEN)
        )
        return Score(result["reward"], result["components"], seconds, by_turn, by_token)

    def _load_error(self, lost: ChildLost) -> ConfigError:
        if lost.kind == "changed":
            return ConfigError(
                f"reward function {self.name} changed during the run (version "
                f"{self.digest[:12]}, now {lost.ending}); start the run again"
            )
        name = f"reward function {self.name}"
        return lost.as_load_error(name, see="reward.function and reward.memory_bytes")


def build_settings(
    config: RewardConfig, profiles: Mapping[str | None, Profile], profile: Profile
) -> ChildSettings:
    """Return the settings of the children that run the functions of one profile.

    Args:
        config: The section.
        profiles: The profile of each function, by source.
        profile: Which of them.
    """
    sources = [source for source in profiles if profiles[source] is profile]
    chosen = [config.chosen[source] for source in sources]
    options = [value for one in chosen for value in one.options.values() if isinstance(value, str)]
    return ChildSettings(
        entry_point=find_reward(str(chosen[0].function)),
        setup={
            **config.model_dump(exclude={"processes"}),
            "loaded": [source or "" for source in sources],
            "is_disposable": profile is Profile.PURE,
        },
        size=config.num_processes,
        fixed_facts=("digests",),
        readable=tuple(str(Path(value).absolute()) for value in options if is_file(value)),
        ports=list_ports(value for value in options if "://" in value),
        variables=config.variables,
        limits=FrameLimits(ANSWER_BYTES, 0),
    )


def is_file(text: str) -> bool:
    """Return whether an option names a file."""
    try:
        return Path(text).is_file()
    except (OSError, ValueError):
        return False


def _describe_form(facts: Mapping[str, Any]) -> tuple[str, bool, bool]:
    return facts["name"], facts["takes_prompt_group"], facts[IS_CONCURRENT]


def _put(done: SimpleQueue[tuple[Call, Result]], call: Call, result: Result) -> None:
    done.put((call, result))


def _take_all(done: SimpleQueue[tuple[Call, Result]]) -> list[tuple[Call, Result]]:
    """Wait for a result, and return it with the other results that have arrived."""
    results = [done.get()]
    with contextlib.suppress(Empty):
        while True:
            results.append(done.get_nowait())
    return results


def _build_group_call(
    numbered: Sequence[tuple[int, RewardItem]], optional_arguments: Sequence[str]
) -> Call:
    return Call(
        tuple(index for index, _ in numbered),
        _build_head([item for _, item in numbered], optional_arguments),
    )


def _build_head(items: Sequence[RewardItem], optional_arguments: Sequence[str]) -> dict[str, Any]:
    first = items[0]
    return {
        "completions": [item.completion for item in items],
        "answer": first.answer,
        "metadata": first.metadata,
        "prompt": first.prompt,
        **{name: [SERIALIZERS[name](item) for item in items] for name in optional_arguments},
    }


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
