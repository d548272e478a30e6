"""Copies of a model that several ranks hold: which rank speaks for each."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from relax_events.config.topology import Topology
from relax_events.training.ranks import DataRanks, SingleRank

pytestmark = pytest.mark.unit


class EightRanks(SingleRank):
    """Rank 5 of eight, of which each gathers its number."""

    rank = 5
    size = 8

    @property
    def topology(self) -> Topology:
        """Two stages of two data-parallel copies of two tensor-parallel ranks."""
        return Topology.of(8, tensor=2, pipeline=2)

    def all_gather(self, values: NDArray[np.generic]) -> NDArray[np.generic]:
        """Return the ranks' numbers."""
        return np.arange(8)[:, None] + 0 * values[None].astype(np.int64)

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Return the ranks' numbers."""
        return [str(rank).encode() for rank in range(8)]


def test_the_first_rank_of_the_last_stage_speaks_for_each_copy() -> None:
    ranks = DataRanks(EightRanks())
    assert (ranks.rank, ranks.size) == (0, 2)
    assert ranks.all_gather(np.zeros(1)).tolist() == [[4], [6]]
    assert ranks.all_gather_bytes(b"") == [b"4", b"6"]


def test_without_model_parallelism_every_rank_speaks() -> None:
    assert DataRanks(SingleRank()).all_gather(np.array([3])).tolist() == [[3]]
