"""How a map role cuts a record batch into parts; the loop itself is tested with a broker."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from event_samples import rolled_out

from relax_events.broker.records import Record
from relax_events.pipeline.map_role import Fit, parts_of

pytestmark = pytest.mark.unit


def fit(index: int, *, version: int, num_tokens: int) -> Fit:
    """Make a sample, known by its index."""
    sample = replace(rolled_out(), sample_index=index, policy_version=version, tokens=np.ones(num_tokens, np.int32))
    return Record("topic", 0, index, "key", b"", {}, 0), sample


def indices(samples: list[Fit], *, max_tokens: int | None) -> list[list[int]]:
    """Return the parts by the samples' indices."""
    return [[sample.sample_index for _, sample in part] for part in parts_of(samples, max_tokens=max_tokens)]


def test_parts_hold_at_most_the_budget_oldest_version_first() -> None:
    samples = [fit(0, version=2, num_tokens=3), fit(1, version=1, num_tokens=5), fit(2, version=2, num_tokens=4), fit(3, version=1, num_tokens=5)]
    assert indices(samples, max_tokens=10) == [[1, 3], [0, 2]]
    assert indices(samples, max_tokens=8) == [[1], [3, 0], [2]]


def test_parts_give_a_long_sample_one_of_its_own() -> None:
    samples = [fit(0, version=0, num_tokens=1), fit(1, version=0, num_tokens=99), fit(2, version=0, num_tokens=1)]
    assert indices(samples, max_tokens=10) == [[0], [1], [2]]


def test_parts_are_one_when_there_is_no_budget() -> None:
    samples = [fit(0, version=1, num_tokens=50), fit(1, version=0, num_tokens=50)]
    assert indices(samples, max_tokens=None) == [[0, 1]]
