"""What a reward function may return, and what becomes of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

TOTAL = "reward"
RULE = "it must return a number or a dict of numbers"


@dataclass(frozen=True, slots=True)
class Score:
    """What a reward function gave for a sample."""

    reward: float
    components: dict[str, float]
    seconds: float = 0.0


def as_score(value: Any, *, weights: Mapping[str, float] | None = None, seconds: float = 0.0) -> Score:
    """Check what a reward function returned for a sample, and make the reward of it.

    Args:
        value: A number, or named components. Their total is the component `reward` where there is one, else their sum.
        weights: Where given, the reward is the sum of these components times their weights instead.
        seconds: What the call took.
    Raises:
        TypeError: It is neither a number nor a non-empty dict of numbers.
        ValueError: A number is not finite, or a component that has a weight is missing.
    """
    components = value if isinstance(value, dict) else {TOTAL: value}
    if not components:
        raise TypeError(f"returned an empty dict; {RULE}")
    for key, part in components.items():
        if not isinstance(key, str) or not isinstance(part, Real):
            raise TypeError(f"returned {key!r}: {part!r:.60} ({type(part).__name__}); {RULE}")
        if not math.isfinite(part):
            raise ValueError(f"returned {key!r}: {float(part)}; rewards must be finite")
    numbers = {key: float(part) for key, part in components.items()}
    if weights:
        total = _weighted(numbers, weights)
        numbers.pop(TOTAL, None)
    else:
        total = numbers.pop(TOTAL) if TOTAL in numbers else math.fsum(numbers.values())
    return Score(total, numbers, seconds)


def _weighted(numbers: Mapping[str, float], weights: Mapping[str, float]) -> float:
    if missing := sorted(weights.keys() - numbers.keys()):
        raise ValueError(f"returned {', '.join(sorted(numbers))}, but reward.weights also names {', '.join(missing)}")
    return math.fsum(weight * numbers[key] for key, weight in weights.items())
