"""The reward hub: from a name, or a file of the user's, to a function and its version."""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from numbers import Real
from pathlib import Path
from typing import Any, Protocol

from relax_events.errors import ConfigError
from relax_events.plugins import load_file

BUILT_IN = {
    "exact_match": "relax_events.rewards.text_match",
    "gsm8k": "relax_events.rewards.text_match",
    "reasoning_gym": "relax_events.rewards.verifiers",
}
TOTAL = "reward"


class RewardFunction(Protocol):
    """Scores one completion: a number, or named components of which `reward` is the total (without it, their sum is)."""

    def __call__(self, completion: str, *, answer: str, metadata: dict[str, Any], prompt: str) -> float | dict[str, float]:
        """Score a completion.

        Args:
            completion: What the model wrote, without special tokens.
            answer: The reference answer of the prompt.
            metadata: What the prompt's source gave with it.
            prompt: Text of the prompt.
        """


@dataclass(frozen=True, slots=True)
class LoadedReward:
    """A reward function with its version: the SHA-256 of the file that holds it."""

    name: str
    function: Callable[..., Any]
    digest: str


@dataclass(frozen=True, slots=True)
class Score:
    """What a reward function gave for a sample."""

    reward: float
    components: dict[str, float]
    seconds: float = 0.0


def load_reward(name: str) -> LoadedReward:
    """Load a reward function of the hub, or of a file given as `path/to/file.py:function`.

    This runs the file's code: outside of tests only a reward child does it.

    Raises:
        ConfigError: There is no such name, file or function, or the file fails to load; the text says where.
    """
    if name in BUILT_IN:
        module, function_name = importlib.import_module(BUILT_IN[name]), name
    else:
        path, _, function_name = name.rpartition(":")
        if not path.endswith(".py") or not function_name:
            raise ConfigError(f"reward.function must be {', '.join(BUILT_IN)} or path/to/file.py:function, got {name!r}; set reward.function")
        if not Path(path).is_file():
            raise ConfigError(f"reward file {path} does not exist; set reward.function = 'path/to/file.py:function'")
        module = load_file(Path(path), what="reward file")
    function = getattr(module, function_name, None)
    if not callable(function):
        defined = [key for key, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == module.__name__]
        raise ConfigError(f"{name}: {module.__file__} has no function {function_name!r}, only {', '.join(defined) or 'none'}; set reward.function")
    return LoadedReward(name, function, sha256(Path(str(module.__file__)).read_bytes()).hexdigest())


def as_score(value: Any, *, seconds: float = 0.0) -> Score:
    """Check what a reward function returned.

    Raises:
        TypeError: It is neither a number nor a non-empty dict of numbers.
        ValueError: A number is not finite.
    """
    components = value if isinstance(value, dict) else {TOTAL: value}
    if not components:
        raise TypeError("returned an empty dict; it must return a number or a dict of numbers")
    for key, part in components.items():
        if not isinstance(key, str) or not isinstance(part, Real):
            raise TypeError(f"returned {key!r}: {part!r:.60} ({type(part).__name__}); it must return a number or a dict of numbers")
        if not math.isfinite(part):
            raise ValueError(f"returned {key!r}: {float(part)}; rewards must be finite")
    numbers = {key: float(part) for key, part in components.items()}
    total = numbers.pop(TOTAL) if TOTAL in numbers else math.fsum(numbers.values())
    return Score(total, numbers, seconds)
