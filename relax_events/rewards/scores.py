"""Parse the return value of a reward function into a score."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

from relax_events.events.immutable import immutable
from relax_events.events.parts import REWARD_RANGE, is_reward

TOTAL = "reward"
EXPLAINS = "explains"
"""Key of a request that asks for the explanation of a reward."""
BY_TURN, BY_TOKEN = "turn_rewards", "token_rewards"
RULE = "it must return a number or a dict of numbers"


@immutable(frozen=True, slots=True)
class Score:
    """The score of a sample; `reward` includes the turn and token rewards."""

    reward: float
    components: dict[str, float]
    seconds: float = 0.0
    turn_rewards: tuple[float, ...] | None = None
    token_rewards: tuple[float, ...] | None = None


def parse_score(
    value: Any, *, weights: Mapping[str, float] | None = None, seconds: float = 0.0
) -> Score:
    """Validate the return value of a reward function for a sample, and compute the total.

    Args:
        value: A number, or named components. The total is the component `reward` if present, else
            the sum. The lists `turn_rewards` and `token_rewards` are not components; their values
            are added to the total.
        weights: If given, the total is the weighted sum of these components.
        seconds: Duration of the call.
    Raises:
        TypeError: The value is neither a number nor a non-empty dict of numbers, or a list holds
            something else. ValueError: A number or the total is beyond the range of float32, or a
            weighted component is missing.
    """
    components = dict(value) if isinstance(value, dict) else {TOTAL: value}
    if not components:
        raise TypeError(f"returned an empty dict; {RULE}")
    turn_rewards, token_rewards = (
        _parse_list(components.pop(name), name) if name in components else None
        for name in (BY_TURN, BY_TOKEN)
    )
    for key, part in components.items():
        if not isinstance(key, str) or not isinstance(part, Real):
            raise TypeError(f"returned {key!r}: {part!r:.60} ({type(part).__name__}); {RULE}")
        if not is_reward(part):
            raise ValueError(f"returned {key!r}: {part!s:.60}; rewards must be {REWARD_RANGE}")
    numbers = {key: float(part) for key, part in components.items()}
    if weights:
        total = _weighted_sum(numbers, weights)
        numbers.pop(TOTAL, None)
    else:
        total = numbers.pop(TOTAL) if TOTAL in numbers else math.fsum(numbers.values())
    reward = total + sum((*(turn_rewards or ()), *(token_rewards or ())))
    if not is_reward(reward):
        raise ValueError(
            f"returned numbers that add up to {reward}; rewards must be {REWARD_RANGE}"
        )
    return Score(reward, numbers, seconds, turn_rewards or None, token_rewards or None)


def _parse_list(value: Any, name: str) -> tuple[float, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(part, Real) for part in value):
        raise TypeError(
            f"returned {name!r}: {value!r:.60} ({type(value).__name__}); it must be a list "
            "of numbers"
        )
    for index, part in enumerate(value):
        if not is_reward(part):
            raise ValueError(
                f"returned {part!s:.60} at {index} of {name!r}; rewards must be {REWARD_RANGE}"
            )
    return tuple(map(float, value))


def _weighted_sum(numbers: Mapping[str, float], weights: Mapping[str, float]) -> float:
    if missing := sorted(weights.keys() - numbers.keys()):
        raise ValueError(
            f"returned {', '.join(sorted(numbers))}, but reward.weights also names "
            f"{', '.join(missing)}"
        )
    return math.fsum(weight * numbers[key] for key, weight in weights.items())
