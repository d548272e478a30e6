"""Environments in the form of Gymnasium: `reset` and `step` with observation, reward and ends. The
actions are the policy's texts, the observations texts or images.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from relax_events.environments.interfaces.contents import read_observation
from relax_events.environments.interfaces.interaction import is_asynchronous
from relax_events.environments.interfaces.protocol import (
    Observation,
    Opening,
    Task,
    call,
    read_reward,
)
from relax_events.plugins import select_named


class GymnasiumAdapter:
    """Builds an environment for each sample by a class or function, from the options."""

    takes_files = False

    def __init__(self, build: Callable[..., Any], options: Mapping[str, Any]) -> None:
        self._build, self._options = build, options
        self.is_concurrent = is_asynchronous(build)

    def begin(self, task: Task) -> GymnasiumSession:
        """See `Adapter`."""
        return GymnasiumSession(self._build, self._options, task)


class GymnasiumSession:
    """A sample's environment; see `Session`.

    All samples of a prompt group are reset with the same seed: `seed` of the row's metadata, or one
    that follows from the prompt group. `options` of the metadata are given to `reset`.
    """

    def __init__(self, build: Callable[..., Any], options: Mapping[str, Any], task: Task) -> None:
        self._build, self._options, self._task = build, options, task
        self._environment: Any = None

    async def open(self) -> Opening:
        """Build and reset the environment; its first observation follows the prompt."""
        self._environment = await call(self._build, **self._options)
        metadata = self._task.metadata
        offered = {
            "seed": metadata.get("seed", self._task.seed),
            "options": metadata.get("options"),
        }
        named = select_named(self._environment.reset, offered)
        result = await call(self._environment.reset, **{name: offered[name] for name in named})
        observation = result[0] if isinstance(result, tuple) else result
        reply = read_observation(observation, reads_files=True)
        return Opening(messages=[] if reply is None else [reply])

    async def step(self, completion: str) -> Observation:
        """Take a turn as an action; both the form with five values and the older one with four are
        read.
        """
        observation, reward, *ends, _ = await call(self._environment.step, completion)
        reply = read_observation(observation, reads_files=True)
        return Observation(
            replies=[] if reply is None else [reply],
            is_over=any(map(bool, ends)),
            reward=read_reward(reward),
        )

    async def close(self) -> None:
        """Close the environment, if it has a `close`."""
        if self._environment is not None and hasattr(self._environment, "close"):
            await call(self._environment.close)
