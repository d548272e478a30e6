"""Runs of placeholders that stand together in a sequence: which tokens, at which rotary positions, for which features of a piece."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64


@dataclass(frozen=True, slots=True, eq=False)
class MediaBlock:
    """Placeholders one after the other.

    Attributes:
        ids: Their tokens.
        offsets: Time, row and column of each, counted from where the block begins.
        features: Which of its piece's features each stands for.
        first_last: The text behind goes on one behind the largest offset from here on.
    """

    ids: Int64[np.ndarray, " cells"]
    offsets: Int64[np.ndarray, "3 cells"]
    features: Int64[np.ndarray, " cells"]
    first_last: int = 0

    def __len__(self) -> int:
        """Return the number of placeholders."""
        return len(self.ids)

    @property
    def extent(self) -> int:
        """Positions that it takes."""
        return int(self.offsets[:, self.first_last :].max()) + 1


def seen_block(token: int, grid: tuple[int, int, int], *, interval: int = 0, first_feature: int = 0) -> MediaBlock:
    """Lay out what is seen: moment by moment, row by row.

    Args:
        token: The placeholder.
        grid: Tokens in time, in rows and in columns.
        interval: Positions from one moment to the next.
        first_feature: Of the piece's features, the block's first.
    """
    moments, rows, columns = (index.ravel() for index in np.indices(grid, np.int64))
    size = len(moments)
    return MediaBlock(np.full(size, token), np.stack([moments * interval, rows, columns]), first_feature + np.arange(size))


def heard_block(token: int, num_tokens: int, *, first_feature: int = 0) -> MediaBlock:
    """Lay out what is heard: one token after the other, as text."""
    line = np.arange(num_tokens)
    return MediaBlock(np.full(num_tokens, token), np.tile(line, (3, 1)), first_feature + line)


def in_order_of_time(seen: MediaBlock, heard: MediaBlock) -> MediaBlock:
    """Lay out what is seen and heard at once, in the order of time; what is seen goes before what is heard at the same position.

    Once one of them has ended, what is left of the other says alone where the text goes on, as the model was trained.

    Source: `Qwen3OmniMoeProcessor` and `get_rope_index` of transformers.
    """
    ids, offsets, features = (
        np.concatenate([getattr(seen, name), getattr(heard, name)], axis=-1) for name in ("ids", "offsets", "features")
    )
    order = np.argsort(offsets[0], kind="stable")
    is_seen = order < len(seen)
    first_last = int(np.flatnonzero(is_seen != is_seen[-1])[-1]) + 1
    return MediaBlock(ids[order], offsets[:, order], features[order], first_last)
