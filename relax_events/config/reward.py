"""The section `reward`: how a sample is scored."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from relax_events.config.addresses import is_in_clear
from relax_events.config.base import Positive, Seconds, Section
from relax_events.config.external_values import Code, Names, Options, Text
from relax_events.config.resume_rules import SPEED, free

MAX_PROCESSES = 8
JUDGED = "genrm"
"""The reward function whose samples a judge of the run scores."""
TOKEN_VARIABLE = re.compile(r"(JUDGE|REWARD|RELAX)_([A-Z0-9]+_)*TOKEN")
"""Names of environment variables whose values a reward function may send to its service without
being listed."""
Finite = Annotated[float, Field(allow_inf_nan=False)]


class ChosenReward(Section):
    """A reward function with its settings."""

    function: Code = "exact_match"
    """A name that `relax rewards` knows, or `path/to/file.py:function`."""
    options: Options = Field(default_factory=dict)
    """Settings of the function, passed as keyword arguments; `relax rewards NAME` lists
    them."""
    weights: Annotated[dict[str, Finite], Names.NOTHING] = Field(default_factory=dict)
    """Weights of the reward's components: the reward becomes their weighted sum. Empty uses the
    function's own reward."""


class RewardConfig(ChosenReward):
    """The reward function that scores samples."""

    routes: dict[str, ChosenReward] = Field(default_factory=dict)
    """Other functions for the samples of other sources: tables by the value that `route_key` has in
    a sample's metadata, each with `function`, `options` and `weights`. All other samples go to the
    function above."""
    route_key: Text = "data_source"
    """Metadata key of a sample that names its source: it selects one of `routes`, and a teacher of
    `teachers`."""
    timeout_seconds: Annotated[Seconds, free("when a score counts as failed")] = 10.0
    """Deadline of a call; after it the process is killed and the call counts as failed."""
    on_timeout: Finite | Literal["none"] = 0.0
    """Reward of a sample whose turn made its program or its environment late, for example by an
    endless loop in code that the policy wrote; with "none" it has no reward and is not trained. Set
    it to the lowest reward: where wrong answers get less, it would teach the policy to be late."""
    processes: Annotated[int, Field(ge=0), free(SPEED)] = 0
    """Child processes that run the function; 0 is one for each available core, up to 8."""
    concurrency: Annotated[Positive, free(SPEED)] = 16
    """Concurrent calls of one child process when the function is `async def`; other functions run
    one call at a time."""
    memory_bytes: Annotated[Positive, free("when a score counts as failed")] = 4 * 1024**3
    """Address space limit of one child process."""
    environment: Annotated[tuple[str, ...], Names.VARIABLE] = ()
    """Names of environment variables that the function may read. Its child process gets these,
    those that its options name (`token_variable`), and non-secret ones such as paths of programs
    and caches. An option may name a variable listed here, or one like `JUDGE_TOKEN`,
    `REWARD_MATH_TOKEN` or `RELAX_TOKEN`; its value is never sent unencrypted to another machine."""

    @model_validator(mode="after")
    def _sends_only_tokens(self) -> RewardConfig:
        for one in self.chosen.values():
            for key, value in one.options.items():
                if key.endswith("_variable") and value:
                    self._check_variable(key, str(value), one.options)
        return self

    def _check_variable(self, key: str, name: str, options: Mapping[str, Any]) -> None:
        if name not in self.environment and not TOKEN_VARIABLE.fullmatch(name):
            raise ValueError(
                f"options.{key} = {name!r} names an environment variable whose value is sent to a "
                "service; take a name such as JUDGE_TOKEN or REWARD_MATH_TOKEN, or list this one "
                "in the section's environment"
            )
        if url := next(
            (
                value
                for value in options.values()
                if isinstance(value, str) and "://" in value and is_in_clear(value)
            ),
            None,
        ):
            raise ValueError(
                f"options.{key} = {name!r} would be sent unencrypted to {url}; take an https "
                f"address, one of this machine (127.0.0.1), or leave {key} out"
            )

    @property
    def num_processes(self) -> int:
        """Child processes on this machine."""
        return self.processes or min(len(os.sched_getaffinity(0)), MAX_PROCESSES)

    @property
    def variables(self) -> frozenset[str]:
        """Names of the environment variables that the functions may read."""
        options = (option for one in self.chosen.values() for option in one.options.items())
        return frozenset(
            {
                *self.environment,
                *(str(value) for name, value in options if name.endswith("_variable") and value),
            }
        )

    @property
    def chosen(self) -> Mapping[str | None, ChosenReward]:
        """All functions by the source whose samples they score; None stands for the samples of all
        others.
        """
        default: dict[str | None, ChosenReward] = {None: self}
        return default | dict(self.routes)

    @property
    def judged_sources(self) -> frozenset[str | None]:
        """Which of `chosen` an LLM judge of the run scores: `genrm` without the URL of another."""
        return frozenset(
            source
            for source, one in self.chosen.items()
            if one.function == JUDGED and "url" not in one.options
        )

    def find_source(self, metadata: Mapping[str, Any]) -> str | None:
        """Return which of `chosen` a sample with this metadata goes to."""
        source = metadata.get(self.route_key)
        return source if isinstance(source, str) and source in self.routes else None

    def without(self, function: str) -> RewardConfig | None:
        """Return the section without one function, for a role that is never given its samples; None
        where no other is left.
        """
        others = {
            source: chosen for source, chosen in self.routes.items() if chosen.function != function
        }
        if self.function != function:
            return self.model_copy(update={"routes": others})
        if not others:
            return None
        first = next(iter(others.values()))
        return self.model_copy(
            update={
                "function": first.function,
                "options": first.options,
                "weights": first.weights,
                "routes": others,
            }
        )
