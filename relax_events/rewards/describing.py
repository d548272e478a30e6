"""What there is to say about a reward, for people."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass

from relax_events.rewards.declaring import facts_of
from relax_events.rewards.hub import RewardOption, find_function, options_of, takes_prompt_group


@dataclass(frozen=True, slots=True)
class RewardDescription:
    """A reward in words; `scores` says what one call is about, `failures` when a sample gets no reward."""

    name: str
    scores: str
    summary: str
    text: str
    failures: list[str]
    metadata: Mapping[str, str]
    options: list[RewardOption]
    source: str
    packages: tuple[str, ...]


def describe_reward(name: str) -> RewardDescription:
    """Describe a reward of the hub, or of a file, without making it ready to be called.

    Raises:
        ConfigError: There is no such reward, or its file fails to load.
    """
    function, _ = find_function(name)
    facts, (text, _, raised) = facts_of(function), (inspect.getdoc(function) or "").partition("\n\nRaises:\n")
    return RewardDescription(
        name=name,
        scores="prompt groups" if takes_prompt_group(function) else "samples",
        summary=text.partition("\n")[0],
        text=text,
        failures=[line.partition(": ")[2] for line in raised.splitlines()],
        metadata=dict(facts.metadata),
        options=options_of(function),
        source=facts.source,
        packages=facts.packages,
    )
