"""What a reward function imports; it needs none of it."""

from relax_events.errors import EnvironmentProblem, RewardError
from relax_events.rewards.registry import Explanation, reward
from relax_events.sandbox import Limits, Sandbox, Verdict, require_isolation

__all__ = [
    "EnvironmentProblem",
    "Explanation",
    "Limits",
    "RewardError",
    "Sandbox",
    "Verdict",
    "require_isolation",
    "reward",
]
