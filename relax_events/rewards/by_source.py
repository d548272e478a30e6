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
    """The run's reward function, and more by the value of a metadata key. All have the same call
    signature.
    """

    default: LoadedReward
    by_source: Mapping[Any, LoadedReward]
    key: str

    @property
    def takes_prompt_group(self) -> bool:
        """Whether the functions score whole prompt groups."""
        return self.default.takes_prompt_group

    @property
    def is_async(self) -> bool:
        """Whether the functions are coroutines."""
        return self.default.is_async

    @property
    def optional_arguments(self) -> list[str]:
        """Names of the optional arguments that at least one function takes."""
        return sorted(
            {
                name
                for reward in (self.default, *self.by_source.values())
                for name in reward.optional_arguments
            }
        )

    @property
    def digest(self) -> str:
        """The version of all functions together; with a single function, its version."""
        if not self.by_source:
            return self.default.digest
        versions = {
            "": self.default.digest,
            **{source: reward.digest for source, reward in self.by_source.items()},
        }
        return sha256(orjson.dumps([self.key, versions], option=orjson.OPT_SORT_KEYS)).hexdigest()

    @property
    def files(self) -> list[Path]:
        """The files whose code determines the rewards."""
        return sorted(
            {file for reward in (self.default, *self.by_source.values()) for file in reward.files}
        )

    def reward_for(self, metadata: Mapping[str, Any]) -> LoadedReward:
        """Return the function for a sample with this metadata."""
        source = metadata.get(self.key) if self.by_source else None
        return self.by_source.get(source, self.default) if isinstance(source, str) else self.default


def load_routes(config: Mapping[str, Any]) -> RewardRoutes:
    """Load all functions of a reward section, given as a dictionary.

    Raises:
        ConfigError: A function can't be loaded, or their call signatures differ.
    """
    default, *others = (
        load_reward(chosen["function"], options=chosen["options"], weights=chosen["weights"])
        for chosen in (config, *config["routes"].values())
    )
    for other in others:
        for what, mine, theirs in (
            ("takes whole prompt groups", default.takes_prompt_group, other.takes_prompt_group),
            ("is async def", default.is_async, other.is_async),
        ):
            if mine != theirs:
                only, not_so = (default, other) if mine else (other, default)
                raise ConfigError(
                    f"{only.name} {what}, unlike {not_so.name}; all functions of one "
                    "run must have the same form, see reward.routes"
                )
    return RewardRoutes(
        default, dict(zip(config["routes"], others, strict=True)), config["route_key"]
    )
