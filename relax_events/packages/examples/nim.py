"""Nim against oneself: the policy plays both sides of each game, and learns from the turns of both.

Some stones lie on a table. Two players take one to three of them in turn. The player who takes the
last stone wins. A move that is no number from one to three, or more than the stones left, loses.
"""

from __future__ import annotations

from typing import Any

import numpy as np

MIN_STONES, MAX_STONES = 4, 12
MAX_TAKEN = 3


class Nim:
    """The table, in the form of Gymnasium. `reset` takes the number of stones as an option."""

    def __init__(self) -> None:
        self._stones = 0

    def reset(self, *, options: dict[str, int]) -> tuple[str, dict[str, Any]]:
        """Put stones on the table; the prompt already says how many."""
        self._stones = int(options["stones"])
        return "", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take stones; the observation is the number of stones left, for the other player. The
        rewards come from `score_game`, since a turn's worth shows at the end only.
        """
        self._stones, is_over, _ = take(self._stones, action)
        return str(self._stones), 0.0, is_over, False, {}


def take(stones: int, action: str) -> tuple[int, bool, bool]:
    """Return the stones that are left, whether the game is over, and whether the mover has won."""
    text = action.strip()
    count = int(text) if text in ("1", "2", "3") else 0
    if not count or count > stones:
        return stones, True, False
    return stones - count, stones == count, stones == count


def best_move(stones: int) -> int:
    """Return the move that wins, or 0 if every move loses against the best play."""
    return stones % (MAX_TAKEN + 1)


def score_game(
    completion: str,
    *,
    answer: str,
    metadata: dict[str, Any],
    prompt: str,
    turns: list[dict[str, str]],
) -> dict[str, float | list[float]]:
    """Give each turn of the winner 1 and each of the loser -1.

    The rewards from a turn on add up to its player's result, which `reinforce_plus_plus` credits to
    the turn. The component `best_moves` is the share of winning moves in positions that have one;
    it is 1 after a game without any such position.
    """
    moves = [turn["content"] for turn in turns if turn["role"] == "assistant"]
    stones, best_moves, has_won = int(metadata["options"]["stones"]), [], False
    for move in moves:
        if best_move(stones):
            best_moves.append(move.strip() == str(best_move(stones)))
        stones, _, has_won = take(stones, move)
    last = 1.0 if has_won else -1.0
    results = [last * (-1.0) ** (len(moves) - 1 - index) for index in range(len(moves))]
    following = [*results[1:], 0.0]
    return {
        "reward": 0.0,
        "best_moves": float(np.mean(best_moves)) if best_moves else 1.0,
        "turn_rewards": [result - later for result, later in zip(results, following, strict=True)],
    }


def make_game(generator: np.random.Generator) -> tuple[str, str, dict[str, Any]]:
    """Make the start of a game, with a game of random moves for the warm-up."""
    stones = int(generator.integers(MIN_STONES, MAX_STONES + 1))
    left, moves, replies = stones, [], []
    while left:
        moves.append(int(generator.integers(1, min(MAX_TAKEN, left) + 1)))
        left -= moves[-1]
        replies.append({"role": "user", "content": str(left)})
    metadata = {
        "options": {"stones": stones},
        "moves": list(map(str, moves)),
        "replies": replies[:-1],
    }
    return str(stones), "", metadata
