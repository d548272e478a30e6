"""The endless order of prompts is a fresh permutation each epoch, whatever the size and the
seed."""

from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_events.data.rows import InvalidRows, PromptRow
from relax_events.data.stream import (
    MAX_CYCLE,
    DatasetRow,
    PromptOrder,
    PromptStream,
    count_turns,
    permute,
)

SIZES = st.integers(min_value=1, max_value=300)
SEEDS = st.integers(min_value=0, max_value=2**31 - 1)


@dataclass(frozen=True)
class Numbers:
    """A source whose rows have their own number as answer."""

    num_rows: int

    @property
    def invalid_rows(self) -> InvalidRows:
        return InvalidRows("data")

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
    stream, other = (
        PromptStream(Numbers(rows), seed=value, shuffle=True) for value in (seed, seed + 1)
    )
    assert epoch(stream, 0, rows) != epoch(stream, 1, rows)
    assert epoch(stream, 0, rows) != epoch(other, 0, rows)


@given(rows=SIZES, seed=SEEDS, row_number=st.integers(min_value=0, max_value=10**9))
def test_stream_gives_the_same_row_again_after_a_restart(
    rows: int, seed: int, row_number: int
) -> None:
    first, second = (PromptStream(Numbers(rows), seed=seed, shuffle=True) for _ in range(2))
    assert first[row_number] == second[row_number]


@given(rows=SIZES, row_number=st.integers(min_value=0, max_value=10**9))
def test_stream_keeps_the_order_of_the_source_without_shuffling(rows: int, row_number: int) -> None:
    assert (
        PromptStream(Numbers(rows), seed=0, shuffle=False).order.dataset_row(row_number).index
        == row_number % rows
    )


def test_stream_rejects_a_negative_row_number() -> None:
    with pytest.raises(IndexError, match="row_number must be >= 0, got -1"):
        PromptStream(Numbers(3), seed=0, shuffle=True).order.dataset_row(-1)


WEIGHTS = st.lists(
    st.integers(min_value=1, max_value=60).map(lambda tenths: tenths / 10), min_size=1, max_size=4
)


@settings(max_examples=50)
@given(
    weights=WEIGHTS,
    seed=SEEDS,
    start=st.integers(min_value=0, max_value=10**6),
    shuffle=st.booleans(),
)
def test_mixture_gives_every_dataset_its_share_in_any_interval(
    weights: list[float], seed: int, start: int, shuffle: bool
) -> None:
    order = PromptOrder([7] * len(weights), seed=seed, shuffle=shuffle, weights=weights)
    counts = [0] * len(weights)
    for position in range(start, start + 200):
        counts[order.dataset_row(position).dataset] += 1
    for count, weight in zip(counts, weights, strict=True):
        # Evenly spread, a dataset is never more than one position ahead or behind for each of the
        # others; at both ends of what is looked at.
        assert abs(count - 200 * weight / sum(weights)) <= len(weights) + 1


@settings(max_examples=30)
@given(
    sizes=st.lists(st.integers(min_value=1, max_value=40), min_size=2, max_size=3),
    seed=SEEDS,
    data=st.data(),
)
def test_mixture_goes_through_the_epochs_of_each_dataset(
    sizes: list[int], seed: int, data: st.DataObject
) -> None:
    weights = data.draw(
        st.lists(st.sampled_from([0.5, 1.0, 2.0, 3.0]), min_size=len(sizes), max_size=len(sizes))
    )
    order = PromptOrder(sizes, seed=seed, shuffle=True, weights=weights)
    dataset_rows = [
        order.dataset_row(position) for position in range(600)
    ]  # at least 46 of each, by weights of 0.5, 3 and 3
    for dataset, size in enumerate(sizes):
        indices = [
            dataset_row.index for dataset_row in dataset_rows if dataset_row.dataset == dataset
        ]
        whole = len(indices) // size
        assert whole > 0
        for epoch_number in range(whole):
            assert sorted(indices[epoch_number * size : (epoch_number + 1) * size]) == list(
                range(size)
            )


def test_mixture_of_three_to_one_is_as_worked_out_by_hand() -> None:
    # Positions of the first at 1/6, 3/6, 5/6 of the cycle, of the second at 1/2; the first dataset
    # goes first where they meet.
    order = PromptOrder([100, 2], seed=0, shuffle=False, weights=[1.5, 0.5])
    dataset_rows = [order.dataset_row(position) for position in range(12)]
    assert [dataset_row.dataset for dataset_row in dataset_rows] == [0, 0, 1, 0] * 3
    assert [dataset_row.index for dataset_row in dataset_rows if dataset_row.dataset == 0] == list(
        range(9)
    )
    assert [dataset_row.index for dataset_row in dataset_rows if dataset_row.dataset == 1] == [
        0,
        1,
        0,
    ]
    assert [order.data_row(position) for position in range(4)] == [0, 1, 100, 2]


def test_mixture_orders_datasets_of_one_size_differently() -> None:
    order = PromptOrder([50, 50], seed=1, shuffle=True, weights=[1, 1])
    dataset_rows = [order.dataset_row(position) for position in range(100)]
    first, second = (
        [dataset_row.index for dataset_row in dataset_rows if dataset_row.dataset == dataset]
        for dataset in (0, 1)
    )
    assert first != second


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ([1.0], [1]),
        ([0.1, 0.2], [1, 2]),
        ([0.7, 0.3], [7, 3]),
        ([2, 4, 6], [1, 2, 3]),
        ([2.5, 1], [5, 2]),
    ],
)
def test_dataset_turns_are_the_smallest_whole_numbers(
    weights: list[float], expected: list[int]
) -> None:
    assert count_turns(weights) == expected


def test_dataset_turns_are_rounded_when_weights_need_too_long_a_cycle() -> None:
    assert count_turns([1.23456789, 1]) == [5525, 4475]  # 10,000 * 1.23456789 / 2.23456789 = 5524.8
    assert count_turns([1e-9, 1.0]) == [1, MAX_CYCLE]


def test_stream_position_maps_to_dataset_and_row() -> None:
    assert PromptOrder([3], seed=0, shuffle=False).dataset_row(4) == DatasetRow(0, 1)


def test_permutation_spreads_neighbours_over_the_whole_range() -> None:
    positions = [permute(position, size=10_000, key="0:0") for position in range(1000)]
    # Independent uniform positions have mean 4999.5 and standard error 10000 / sqrt(12 * 1000) = 91.
    assert abs(sum(positions) / 1000 - 4999.5) < 4 * 91
    jumps = sum(abs(second - first) for first, second in pairwise(positions)) / 999
    assert abs(jumps - 10_000 / 3) < 4 * 75
