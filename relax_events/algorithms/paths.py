"""Where the paths of a sample lie in its arrays, and which token trains each token that they share.

    tokens     p p a a u b b | p p a a v c c        path_lengths 7 7
    loss_mask  0 0 1 1 0 1 1 | 0 0 0 0 0 1 1
    trained    . . 2 3 . 5 6 | . . 2 3 . 12 13

Imports numpy alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int64
from numpy.typing import NDArray


def path_slices(path_lengths: Sequence[int], *, num_tokens: int) -> list[slice]:
    """Return where each path of a sample lies; one that is empty of paths is a path itself.

    Args:
        path_lengths: Tokens of each path; they add up to the sample's.
        num_tokens: Tokens of the sample.
    """
    lengths = list(path_lengths) or [num_tokens]
    ends = np.cumsum(lengths).tolist()
    return [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]


def find_trained_tokens(
    tokens: NDArray[np.generic], loss_mask: NDArray[np.generic], paths: Sequence[slice]
) -> Int64[np.ndarray, " tokens"]:
    """Return which token of the sample trains each token that the policy sampled: itself, or where
    paths share it, that of the first path; -1 for all others.

    What paths share ends before the first loss token of the later one. Tokens that are equal by
    chance between both count as shared: a message of the policy's role has no media.

    Args:
        tokens: Of the sample.
        loss_mask: Of the sample.
        paths: Where its paths lie.
    """
    trained = np.where(loss_mask.astype(bool), np.arange(len(tokens)), -1)
    for number, path in enumerate(paths):
        bound, longest = count_before_loss(loss_mask[path]), 0
        for earlier in paths[:number]:
            limit = min(bound, earlier.stop - earlier.start)
            differ = np.flatnonzero(tokens[path][:limit] != tokens[earlier][:limit])
            num_shared = int(differ[0]) if len(differ) else limit
            if num_shared > longest:
                longest = num_shared
                trained[path][:longest] = trained[earlier][:longest]
    return trained


def count_before_loss(mask: NDArray[np.generic]) -> int:
    """Return how many tokens stand before the first loss token: all if there is none."""
    positions = np.flatnonzero(mask)
    return int(positions[0]) if len(positions) else len(mask)


def turn_lengths(is_sampled: NDArray[np.generic]) -> Int64[np.ndarray, " turns"]:
    """Count the tokens of each turn: consecutive tokens that the policy generated."""
    positions = np.flatnonzero(is_sampled)
    begins = np.flatnonzero(np.diff(positions, prepend=-2) > 1)
    return np.diff(begins, append=len(positions)).astype(np.int64)


def find_turn_ends(
    tokens: NDArray[np.generic],
    loss_mask: NDArray[np.generic],
    path_lengths: Sequence[int],
) -> Int64[np.ndarray, " turns"]:
    """Return at which loss token each turn of a sample's last path ends, as an index among the loss
    tokens of all paths. These turns are what a reward function is shown.

    Args:
        tokens: Of the sample; several paths are compared by them.
        loss_mask: Of the sample.
        path_lengths: Tokens of each path; empty for a single one.
    """
    paths = path_slices(path_lengths, num_tokens=len(loss_mask))
    trained = find_trained_tokens(tokens, loss_mask, paths)[paths[-1]]
    is_sampled = trained >= 0
    ends = trained[is_sampled][np.cumsum(turn_lengths(is_sampled)) - 1]
    indexes: Int64[np.ndarray, " turns"] = np.cumsum(loss_mask.astype(bool))[ends] - 1
    return indexes
