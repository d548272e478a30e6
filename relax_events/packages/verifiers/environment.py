"""The reward that a stateful environment itself gives."""

from __future__ import annotations

from typing import Any

from relax_events.api.rewards import RewardError


def environment(
    completion: str,
    *,
    answer: str,
    metadata: dict[str, Any],
    prompt: str,
    environment_rewards: list[float],
    by_turn: bool = False,
) -> float | dict[str, float | list[float]]:
    """Give the sum of the rewards that the environment gave to the turns of the sample.

    With `by_turn` each turn has its own reward, which `ppo` and `reinforce_plus_plus` credit to the
    tokens before it.

    Raises:
        RewardError: The environment gives no rewards.
    """
    if not environment_rewards:
        raise RewardError(
            "the sample has no rewards of its environment; set environment.interface to an "
            "interface that gives rewards, or choose another reward.function"
        )
    if by_turn:
        return {"reward": 0.0, "turn_rewards": environment_rewards}
    return sum(environment_rewards)
