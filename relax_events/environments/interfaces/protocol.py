"""What an adapter makes of a foreign interface: sessions, each the environment of one sample."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from relax_events.environments.reply import Reply
from relax_events.events.parts import REWARD_RANGE, is_reward

DEADLINES = {"open": "start_seconds", "step": "timeout_seconds", "close": "timeout_seconds"}
"""The key of each call's deadline, in the section `environment`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The row that a session is opened for.

    Attributes:
        sample_id: Of the sample, for texts.
        seed: The same for all samples of a prompt group, 0 to 2**31 - 1.
        messages: The prompt, as `Environment` receives it.
        answer: The reference answer.
        metadata: The row's metadata.
        files: The media of `messages`, in order; empty unless the adapter takes them.
    """

    sample_id: str
    seed: int
    messages: list[dict[str, Any]]
    answer: str
    metadata: dict[str, Any]
    files: list[bytes] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """What an environment says before the first turn.

    Attributes:
        messages: Messages that follow the row's.
        replaces_prompt: Whether they take the place of the row's messages.
        tools: Tools that the chat template shows, in OpenAI's format, in addition to the row's.
    """

    messages: Sequence[Reply] = ()
    replaces_prompt: bool = False
    tools: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What an environment says to a turn.

    Attributes:
        replies: The messages before the next turn.
        is_over: Whether the sample has ended; the replies are then not read.
        reward: Of the turn; None from environments that give none.
    """

    replies: Sequence[Reply] = ()
    is_over: bool = False
    reward: float | None = None


class Session(Protocol):
    """The environment of one sample. Its calls follow one another; an error or a missed deadline
    ends the episode, which is begun again in a new session.
    """

    async def open(self) -> Opening:
        """Set the environment up; deadline `environment.start_seconds`."""
        ...

    async def step(self, completion: str) -> Observation:
        """Answer a turn of the policy; deadline `environment.timeout_seconds`."""
        ...

    async def close(self) -> None:
        """Release what the session holds, also after a failure; deadline
        `environment.timeout_seconds`.
        """
        ...


class Adapter(Protocol):
    """Opens sessions over a foreign interface. One in each child process.

    Attributes:
        is_concurrent: Whether sessions may run at the same time in one process; else one call
            runs at a time.
        takes_files: Whether its sessions read `Task.files`.
    """

    is_concurrent: bool
    takes_files: bool

    def begin(self, task: Task) -> Session:
        """Return the session of a sample; nothing is set up yet."""
        ...


async def call(function: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    """Call a function that may be a coroutine function, or return an awaitable; an ordinary one
    runs in a thread, so that deadlines hold.
    """
    if inspect.iscoroutinefunction(function):
        return await function(*args, **keywords)
    result = await asyncio.to_thread(function, *args, **keywords)
    return await result if inspect.isawaitable(result) else result


def read_reward(value: Any) -> float:
    """Return a reward as a number.

    Raises:
        ValueError: It is none, or beyond the range of float32.
    """
    if value is None:
        return 0.0
    if not is_reward(value):
        raise ValueError(
            f"the environment's reward must be a number {REWARD_RANGE}, got {value!r:.60}"
        )
    return float(value)
