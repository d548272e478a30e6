"""The group of one rank, and how several ranks are opened."""

import numpy as np
import pytest

from relax_events.errors import EnvironmentProblem
from relax_events.training.distributed import TORCHRUN_VARIABLES, open_ranks
from relax_events.training.ranks import SingleRank


def test_single_rank_collectives_return_their_input():
    ranks = SingleRank()
    np.testing.assert_array_equal(ranks.all_gather(np.array([1, 2])), [[1, 2]])
    assert ranks.all_gather_bytes(b"abc") == [b"abc"]
    assert ranks.broadcast(b"abc") == b"abc"


@pytest.mark.parametrize(("data", "source"), [(None, 0), (b"abc", 1)])
def test_single_rank_rejects_a_broadcast_without_data_or_from_another_rank(data, source):
    with pytest.raises(ValueError, match="the only rank is 0 and must bring the data"):
        SingleRank().broadcast(data, source=source)


def test_open_ranks_returns_a_single_rank_without_torchrun(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with open_ranks(timeout_seconds=5.0) as ranks:
        assert isinstance(ranks, SingleRank)


def test_open_ranks_error_names_missing_torchrun_variables(monkeypatch):
    for name in TORCHRUN_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(
        EnvironmentProblem,
        match="RANK is set but WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT is not",
    ):
        open_ranks(timeout_seconds=5.0)
