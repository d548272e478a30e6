"""The section `reward`: how a sample is scored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from relax_events.config.base import Positive, Seconds, Section

Finite = Annotated[float, Field(allow_inf_nan=False)]


class ChosenReward(Section):
    """A reward function with its settings."""

    function: str = "exact_match"
    """A name that `relax rewards list` knows, or `path/to/file.py:function`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Settings of the function: further keyword arguments that it takes. `relax rewards show NAME` lists them."""
    weights: dict[str, Finite] = Field(default_factory=dict)
    """Makes the reward of the function's components: the sum of each named one times its weight. Empty leaves it to the function."""


class RewardConfig(ChosenReward):
    """How a sample is scored."""

    routes: dict[str, ChosenReward] = Field(default_factory=dict)
    """Other functions for the samples of other sources: tables by the value that `route_key` has in a sample's metadata, each with
    `function`, `options` and `weights`. All other samples go to the function above."""
    route_key: str = "data_source"
    """Key of the metadata that chooses among `routes`."""
    timeout_seconds: Seconds = 10.0
    """A call that takes longer is killed and counted as failed."""
    processes: Positive = 1
    """Child processes that run the function."""
    concurrency: Positive = 16
    """Calls that one child process has under way at a time when the function is `async def`; others run one after the other."""
    memory_bytes: Positive = 4 * 1024**3
    """Address space that one child process may take."""

    @property
    def chosen(self) -> Mapping[str | None, ChosenReward]:
        """All functions by the source whose samples they score; None stands for the samples of all others."""
        own: dict[str | None, ChosenReward] = {None: self}
        return own | dict(self.routes)

    def source_of(self, metadata: Mapping[str, Any]) -> str | None:
        """Return which of `chosen` a sample with this metadata goes to."""
        source = metadata.get(self.route_key)
        return source if isinstance(source, str) and source in self.routes else None

    def without(self, function: str) -> RewardConfig | None:
        """Return the section without one function, for a role that is never given its samples; None where no other is left."""
        others = {source: chosen for source, chosen in self.routes.items() if chosen.function != function}
        if self.function != function:
            return self.model_copy(update={"routes": others})
        if not others:
            return None
        first = next(iter(others.values()))
        return self.model_copy(update={"function": first.function, "options": first.options, "weights": first.weights, "routes": others})
