"""Attach information to reward functions with the decorator `@reward`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])
INFO_ATTRIBUTE = "reward_facts"


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The answer that a reward function extracted, its location, and why it is right or wrong."""

    answer: str | None
    location: str
    why: str


@dataclass(frozen=True, slots=True)
class RewardInfo:
    """Source, requirements and preparation of a reward function."""

    source: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)
    packages: tuple[str, ...] = ()
    prepare: Callable[[], object] | None = None
    require: Callable[[Mapping[str, Any]], object] | None = None
    explain: Callable[..., Explanation] | None = None


def reward(
    *,
    source: str = "",
    metadata: Mapping[str, str] | None = None,
    packages: tuple[str, ...] = (),
    prepare: Callable[[], object] | None = None,
    require: Callable[[Mapping[str, Any]], object] | None = None,
    explain: Callable[..., Explanation] | None = None,
) -> Callable[[Function], Function]:
    """Attach information to a reward function; it is optional.

    Args:
        source: The paper or program whose rules it follows.
        metadata: Keys of the sample's metadata that it reads, each with a description.
        packages: Distributions whose versions are part of the reward's version.
        prepare: Called once before the first call, outside of its time limit, for slow imports.
        require: Called with the options before `prepare`; raises EnvironmentProblem if this machine
            lacks a requirement.
        explain: Called with the function's arguments; explains the reward for `relax rewards
            score`.
    """
    facts = RewardInfo(source, metadata or {}, packages, prepare, require, explain)

    def attach(function: Function) -> Function:
        setattr(function, INFO_ATTRIBUTE, facts)
        return function

    return attach


def read_info(function: Callable[..., Any]) -> RewardInfo:
    """Return a function's information, or the defaults."""
    found = getattr(function, INFO_ATTRIBUTE, None)
    return found if isinstance(found, RewardInfo) else RewardInfo()
