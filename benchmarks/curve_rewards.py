"""The quickstart's reward in components, for algorithms that normalise them apart."""

from __future__ import annotations

from typing import Any

from relax_events.data.sources import import_reasoning_gym
from relax_events.rewards.registry import reward
from relax_events.rewards.verifiers.reasoning_gym import METADATA, reasoning_gym


@reward(metadata=METADATA, packages=("reasoning-gym",), prepare=import_reasoning_gym)
def in_parts(
    completion: str, *, answer: str, metadata: dict[str, Any], prompt: str
) -> dict[str, float]:
    """Score whether the answer is right, and whether it is as long as the right one; the reward
    that is reported is the former."""
    right = reasoning_gym(completion, answer=answer, metadata=metadata, prompt=prompt)
    return {
        "reward": right,
        "right": right,
        "length": float(len(completion.strip()) == len(answer)),
    }
