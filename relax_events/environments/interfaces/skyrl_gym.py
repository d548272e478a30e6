"""Environments in the form of skyrl-gym: `init` with the prompt, and `step` with observations in
messages, a reward and an end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from relax_events.environments.interfaces.contents import read_message
from relax_events.environments.interfaces.interaction import is_asynchronous
from relax_events.environments.interfaces.protocol import (
    Observation,
    Opening,
    Task,
    call,
    read_reward,
)
from relax_events.plugins import select_named


class SkyrlGymAdapter:
    """Builds an environment for each sample by a class or function. It receives the options as
    `env_config`, and the row as `extras`: its metadata, `max_turns`, and the reference answer as
    `reward_spec.ground_truth` unless the metadata have a `reward_spec`.
    """

    takes_files = False

    def __init__(
        self, build: Callable[..., Any], options: Mapping[str, Any], *, max_turns: int
    ) -> None:
        self._build, self._options, self._max_turns = build, options, max_turns
        self.is_concurrent = is_asynchronous(build)

    def begin(self, task: Task) -> SkyrlGymSession:
        """See `Adapter`."""
        extras = {
            "max_turns": self._max_turns,
            "reward_spec": {"ground_truth": task.answer},
            **task.metadata,
        }
        return SkyrlGymSession(self._build, self._options, extras, task)


class SkyrlGymSession:
    """A sample's environment; see `Session`."""

    def __init__(
        self,
        build: Callable[..., Any],
        options: Mapping[str, Any],
        extras: Mapping[str, Any],
        task: Task,
    ) -> None:
        self._build, self._options, self._extras, self._task = build, options, extras, task
        self._environment: Any = None

    async def open(self) -> Opening:
        """Build the environment; a prompt that its `init` changes takes the place of the row's."""
        offered = {"env_config": dict(self._options), "extras": dict(self._extras)}
        named = select_named(self._build, offered)
        self._environment = await call(self._build, **{name: offered[name] for name in named})
        messages = [dict(message) for message in self._task.messages]
        prompt, _ = await call(self._environment.init, messages)
        if prompt == self._task.messages:
            return Opening()
        return Opening(
            messages=[read_message(message, reads_files=True) for message in prompt],
            replaces_prompt=True,
        )

    async def step(self, completion: str) -> Observation:
        """Take a turn as an action."""
        output = await call(self._environment.step, completion)
        return Observation(
            replies=[
                read_message(message, reads_files=True)
                for message in output.get("observations") or ()
            ],
            is_over=bool(output["done"]),
            reward=read_reward(output.get("reward")),
        )

    async def close(self) -> None:
        """Close the environment."""
        if self._environment is not None:
            await call(self._environment.close)
