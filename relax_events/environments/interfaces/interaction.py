"""Environments of Relax: `reset`, `step`, `close` and `format_observation`, as its examples define
them, unchanged.
"""

from __future__ import annotations

import inspect
import typing
from argparse import Namespace
from collections.abc import Callable, Mapping
from io import BytesIO
from types import SimpleNamespace
from typing import Any

from relax_events.environments.interfaces.contents import (
    read_message,
    read_observation,
)
from relax_events.environments.interfaces.protocol import (
    Observation,
    Opening,
    Task,
    call,
    read_reward,
)
from relax_events.plugins import select_named


class InteractionAdapter:
    """Builds an environment for each sample by a class, or by a function `build_env`.

    Either receives as `sample` what Relax's do (`prompt`, `label`, `metadata`,
    `multimodal_inputs`), as `args` the options, and the options by name as far as it names them.
    """

    takes_files = True

    def __init__(self, build: Callable[..., Any], options: Mapping[str, Any]) -> None:
        self._build, self._options = build, options
        self.is_concurrent = is_asynchronous(build)

    def begin(self, task: Task) -> InteractionSession:
        """See `Adapter`."""
        return InteractionSession(self._build, self._options, task)


class InteractionSession:
    """A sample's environment; see `Session`."""

    def __init__(self, build: Callable[..., Any], options: Mapping[str, Any], task: Task) -> None:
        self._build, self._options, self._task = build, options, task
        self._environment: Any = None

    async def open(self) -> Opening:
        """Build the environment and reset it; what `reset` returns is not shown, as in Relax."""
        offered = {
            **self._options,
            "sample": _build_sample(self._task),
            "args": Namespace(**self._options),
        }
        named = select_named(self._build, offered)
        self._environment = await call(self._build, **{name: offered[name] for name in named})
        await call(self._environment.reset)
        return Opening()

    async def step(self, completion: str) -> Observation:
        """Give the environment a turn; a number `reward` in its info is the turn's reward."""
        observation, is_over, info = await call(self._environment.step, completion)
        reward = (info or {}).get("reward")
        replies = []
        if not is_over:
            if hasattr(self._environment, "format_observation"):
                message = await call(self._environment.format_observation, observation)
                replies = [read_message(message, reads_files=True)]
            elif (reply := read_observation(observation, reads_files=True)) is not None:
                replies = [reply]
        return Observation(
            replies=replies,
            is_over=bool(is_over),
            reward=None if reward is None else read_reward(reward),
        )

    async def close(self) -> None:
        """Close the environment, if it has a `close`."""
        if self._environment is not None and hasattr(self._environment, "close"):
            await call(self._environment.close)


def is_asynchronous(build: Callable[..., Any]) -> bool:
    """Return whether what a class or function builds has `async def step`; a function says what it
    builds by its return annotation.
    """
    built = build
    if not inspect.isclass(build):
        try:
            built = typing.get_type_hints(build).get("return", build)
        except NameError:  # imported for type checkers only
            return False
    return inspect.iscoroutinefunction(getattr(built, "step", None))


def _build_sample(task: Task) -> SimpleNamespace:
    """Return the part of Relax's sample that environments read."""
    images = []
    if task.files:
        from PIL import Image

        images = [Image.open(BytesIO(file)) for file in task.files]
    return SimpleNamespace(
        prompt=task.messages,
        label=task.answer,
        metadata=task.metadata,
        multimodal_inputs={"images": images, "image": images} if images else None,
        index=task.sample_id,
    )
