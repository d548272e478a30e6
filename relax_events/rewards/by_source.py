"""Route each sample to the reward function of its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import orjson

from relax_events.errors import ConfigError
from relax_events.rewards.registry import LoadedReward, load_reward


@dataclass(frozen=True, slots=True)
class RewardRoutes:
    """The reward functions that one child process runs: by the value of a metadata key, None for
    the samples of all other sources. All have the same call signature.
    """

    rewards: Mapping[str | None, LoadedReward]
    key: str
    sources: frozenset[str]
    """All sources with a function of their own, in this child or another."""

    @property
    def takes_prompt_group(self) -> bool:
        """Whether the functions score whole prompt groups."""
        return self._any.takes_prompt_group

    @property
    def is_async(self) -> bool:
        """Whether the functions are coroutines."""
        return self._any.is_async

    @property
    def optional_arguments(self) -> list[str]:
        """Names of the optional arguments that at least one function takes."""
        return sorted(
            {name for reward in self.rewards.values() for name in reward.optional_arguments}
        )

    @property
    def digests(self) -> dict[str, str]:
        """The version of each function by source; empty for the samples of all others."""
        return {source or "": reward.digest for source, reward in self.rewards.items()}

    @property
    def files(self) -> list[Path]:
        """The files whose code determines the rewards."""
        return sorted({file for reward in self.rewards.values() for file in reward.files})

    def reward_for(self, metadata: Mapping[str, Any]) -> LoadedReward:
        """Return the function for a sample with this metadata."""
        source = metadata.get(self.key) if self.sources else None
        is_known = isinstance(source, str) and source in self.sources
        return self.rewards[source if is_known else None]

    @property
    def _any(self) -> LoadedReward:
        return next(iter(self.rewards.values()))


def combine_digests(digests: Mapping[str, str], key: str) -> str:
    """Return the version of all functions of a run together; of a single one, its version."""
    if list(digests) == [""]:
        return digests[""]
    return sha256(orjson.dumps([key, digests], option=orjson.OPT_SORT_KEYS)).hexdigest()


def load_routes(setup: Mapping[str, Any]) -> RewardRoutes:
    """Load the functions of a child process.

    Args:
        setup: A reward section as a dictionary; `loaded` lists the sources whose functions this
            child runs, empty for the samples of all others.
    Raises:
        ConfigError: A function can't be loaded, or their call signatures differ.
    """
    chosen = {source: setup["routes"].get(source, setup) for source in setup["loaded"]}
    rewards = {
        source or None: load_reward(one["function"], options=one["options"], weights=one["weights"])
        for source, one in chosen.items()
    }
    routes = RewardRoutes(rewards, setup["route_key"], frozenset(setup["routes"]))
    first, *others = rewards.values()
    for other in others:
        require_same_form(
            (first.name, first.takes_prompt_group, first.is_async),
            (other.name, other.takes_prompt_group, other.is_async),
        )
    return routes


def require_same_form(first: tuple[str, bool, bool], other: tuple[str, bool, bool]) -> None:
    """Raise ConfigError unless two functions of a run have the same form.

    Args:
        first: A function's name, whether it takes whole prompt groups, and is `async def`.
        other: The same of another.
    """
    for what, index in (("takes whole prompt groups", 1), ("is async def", 2)):
        if first[index] != other[index]:
            only, not_so = (first, other) if first[index] else (other, first)
            raise ConfigError(
                f"{only[0]} {what}, unlike {not_so[0]}; all functions of one "
                "run must have the same form, see reward.routes"
            )
