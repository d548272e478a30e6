"""The endless order of prompts is a fresh permutation each epoch, whatever the size and the seed."""

from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_events.data.rows import PromptRow
from relax_events.data.stream import PromptStream, permuted

SIZES = st.integers(min_value=1, max_value=300)
SEEDS = st.integers(min_value=0, max_value=2**31 - 1)


@dataclass(frozen=True)
class Numbers:
    """A source whose rows answer their own number."""

    rows: int

    def row(self, index: int) -> PromptRow:
        return PromptRow([], str(index))


def epoch(stream: PromptStream, number: int, rows: int) -> list[int]:
    return [int(stream[number * rows + position].answer) for position in range(rows)]


@given(rows=SIZES, seed=SEEDS, number=st.integers(min_value=0, max_value=10**6))
def test_stream_gives_every_row_once_an_epoch(rows: int, seed: int, number: int) -> None:
    stream = PromptStream(Numbers(rows), seed=seed, shuffle=True)
    assert sorted(epoch(stream, number, rows)) == list(range(rows))


@given(rows=st.integers(min_value=30, max_value=300), seed=SEEDS)
def test_stream_orders_epochs_and_seeds_differently(rows: int, seed: int) -> None:
    stream, other = (PromptStream(Numbers(rows), seed=value, shuffle=True) for value in (seed, seed + 1))
    assert epoch(stream, 0, rows) != epoch(stream, 1, rows)
    assert epoch(stream, 0, rows) != epoch(other, 0, rows)


@given(rows=SIZES, seed=SEEDS, row_number=st.integers(min_value=0, max_value=10**9))
def test_stream_gives_the_same_row_again_after_a_restart(rows: int, seed: int, row_number: int) -> None:
    first, second = (PromptStream(Numbers(rows), seed=seed, shuffle=True) for _ in range(2))
    assert first[row_number] == second[row_number]


@given(rows=SIZES, row_number=st.integers(min_value=0, max_value=10**9))
def test_stream_keeps_the_order_of_the_source_without_shuffling(rows: int, row_number: int) -> None:
    assert PromptStream(Numbers(rows), seed=0, shuffle=False).order.place(row_number).index == row_number % rows


def test_stream_has_nothing_before_its_start() -> None:
    with pytest.raises(IndexError, match="row_number must be >= 0, got -1"):
        PromptStream(Numbers(3), seed=0, shuffle=True).order.place(-1)


def test_permutation_spreads_neighbours_over_the_whole_range() -> None:
    places = [permuted(position, size=10_000, key="0:0") for position in range(1000)]
    # Independent uniform draws have mean 4999.5 and standard error 10000 / sqrt(12 * 1000) = 91.
    assert abs(sum(places) / 1000 - 4999.5) < 4 * 91
    jumps = sum(abs(second - first) for first, second in pairwise(places)) / 999
    assert abs(jumps - 10_000 / 3) < 4 * 75
