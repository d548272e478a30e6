"""What a reward function says about itself beyond its signature."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])
INFO_ATTRIBUTE = "reward_facts"


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What a reward function read in a completion: the answer, where it stood, and why it is right
    or wrong.
    """

    answer: str | None
    location: str
    why: str


@dataclass(frozen=True, slots=True)
class RewardInfo:
    """Where a reward function comes from, what it needs, and what has to be done before its first
    call.
    """

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
    """Give a reward function its facts; a function without them is as good a reward.

    Args:
        source: The paper or program whose rules it follows.
        metadata: Keys of the sample's metadata that it reads, each with what it holds.
        packages: Distributions whose versions are part of the reward's version.
        prepare: Called once before the first call, outside of its time limit: imports what takes
            seconds.
        require: Called with the options before that; raises EnvironmentProblem where this machine
            lacks something.
        explain: Called as the function is; says for `relax rewards score` what the function read in
            the completion.
    """
    facts = RewardInfo(source, metadata or {}, packages, prepare, require, explain)

    def attach(function: Function) -> Function:
        setattr(function, INFO_ATTRIBUTE, facts)
        return function

    return attach


def read_info(function: Callable[..., Any]) -> RewardInfo:
    """Return what a function declared, or nothing in particular."""
    found = getattr(function, INFO_ATTRIBUTE, None)
    return found if isinstance(found, RewardInfo) else RewardInfo()
