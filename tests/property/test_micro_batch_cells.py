"""Where samples can't share rows, no part of a micro-batch has more cells than the token budget,
and every sample is in exactly one part.
"""

from __future__ import annotations

from itertools import groupby
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_events.training.backend.torch_backend import TorchBackend
from relax_events.training.batch.packing import cut_by_cells
from relax_events.training.ranks import SingleRank
from tests.unit.trainer_samples import make_samples, run_config


def sample(number: int, length: int) -> Any:
    return SimpleNamespace(
        sample_id=str(number),
        prompt_group_id=str(number // 2),
        tokens=np.zeros(length, np.int32),
        path_lengths=(),
    )


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=30),
    budget=st.integers(1, 200),
    whole=st.booleans(),
)
def test_cut_parts_stay_within_the_cell_budget(
    lengths: list[int], budget: int, whole: bool
) -> None:
    samples = [sample(number, length) for number, length in enumerate(lengths)]
    parts = cut_by_cells(samples, max_cells=budget, whole_prompt_groups=whole)
    assert sorted(int(item.sample_id) for part in parts for item in part) == list(
        range(len(lengths))
    )
    for part in parts:
        units = [
            list(members)
            for _, members in groupby(
                part, key=lambda item: item.prompt_group_id if whole else item.sample_id
            )
        ]
        assert len(units) == 1 or len(part) * max(len(item.tokens) for item in part) <= budget
    if whole:
        groups_of_parts = [{item.prompt_group_id for item in part} for part in parts]
        assert sum(map(len, groups_of_parts)) == len({item.prompt_group_id for item in samples})


def test_long_sample_among_short_ones_does_not_pad_them() -> None:
    samples = [sample(0, 8000), *(sample(number, 100) for number in range(1, 21))]
    parts = cut_by_cells(samples, max_cells=10_000)
    assert sum(len(part) * max(len(item.tokens) for item in part) for part in parts) == 10_000


def test_forward_with_one_row_per_sample_stays_within_the_token_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    samples = make_samples(8)
    longest = max(len(item.tokens) for item in samples)
    backend = TorchBackend(
        run_config(trainer={"max_tokens_per_micro_batch": 2 * longest}), ranks=SingleRank()
    )
    backend._model.shares_rows, backend._model.prefix_sharing = False, None
    cells: list[int] = []
    train = backend._train_all
    monkeypatch.setattr(
        backend,
        "_train_all",
        lambda batches, **more: (
            cells.extend(one.batch.input_ids.size for one in batches),
            train(batches, **more),
        ),
    )
    backend.accumulate(samples)
    assert max(cells) <= 2 * longest
    assert backend.step().num_samples == len(samples)
