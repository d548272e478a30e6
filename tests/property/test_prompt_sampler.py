"""Each row is used once, for any ranking by a filter and any crash of the prompter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_events.data.prompt_filter import FilterResult, PassRateFilter, PromptFilter
from relax_events.data.prompt_sampler import PromptSampler, SelectedRow
from relax_events.data.rows import InvalidRows, PromptRow
from relax_events.data.stream import PromptStream
from relax_events.errors import ConfigError

BLOCKS = st.integers(min_value=1, max_value=9)
SIZES = st.integers(min_value=1, max_value=60)


@dataclass
class Numbers:
    """A source whose rows have their own number as answer."""

    num_rows: int
    invalid_rows: InvalidRows = field(default_factory=lambda: InvalidRows("data"))

    def row(self, index: int) -> PromptRow:
        return PromptRow([], str(index))


def stream_of(rows: int) -> PromptStream:
    return PromptStream(Numbers(rows), seed=5, shuffle=False)


def backwards(row: PromptRow, *, mean_rewards: Sequence[float], train_step: int) -> FilterResult:
    """Put high numbers first, and skip every fifth row."""
    number = int(row.answer)
    return "fifth" if number % 5 == 4 else float(-number)


def everything(choices: Sequence[SelectedRow]) -> list[int]:
    return sorted(row for choice in choices for row in (choice.row, *choice.skipped))


@given(
    rows=SIZES,
    first=st.integers(min_value=0, max_value=50),
    counts=st.lists(st.integers(min_value=0, max_value=20), max_size=6),
)
def test_rows_come_in_the_order_of_the_stream_without_filters(
    rows: int, first: int, counts: list[int]
) -> None:
    sampler = PromptSampler(stream_of(rows), first_row=first)
    taken = [choice for count in counts for choice in sampler.next_rows(count, train_step=0)]
    assert taken == [SelectedRow(row) for row in range(first, first + sum(counts))]


@given(
    rows=st.integers(min_value=8, max_value=60),
    block_rows=BLOCKS,
    counts=st.lists(st.integers(min_value=1, max_value=10), min_size=1, max_size=6),
)
def test_filter_orders_within_blocks_and_every_row_is_issued_or_skipped_once(
    rows: int, block_rows: int, counts: list[int]
) -> None:
    sampler = PromptSampler(stream_of(rows), [backwards], block_rows=block_rows)
    choices = [choice for count in counts for choice in sampler.next_rows(count, train_step=0)]
    expected = []
    block = 0
    while len(expected) < len(choices):
        numbers = {row: row % rows for row in range(block * block_rows, (block + 1) * block_rows)}
        expected += [
            row
            for _, row in sorted(
                (-number, row) for row, number in numbers.items() if number % 5 != 4
            )
        ]
        block += 1
    assert [choice.row for choice in choices] == expected[: len(choices)]
    known = everything(choices)
    assert len(known) == len(set(known))
    assert all(
        row % rows % 5 == 4 and reason == "fifth"
        for choice in choices
        for row, reason in choice.skipped.items()
    )


@given(
    block_rows=BLOCKS,
    before=st.integers(min_value=0, max_value=40),
    lost=st.sets(st.integers(min_value=0, max_value=7), max_size=7),
    filtered=st.booleans(),
)
def test_restarted_prompter_loses_no_row_and_repeats_none(
    block_rows: int, before: int, lost: set[int], filtered: bool
) -> None:
    filters: list[PromptFilter] = [backwards] if filtered else []
    first = PromptSampler(stream_of(1000), filters, block_rows=block_rows)
    written = first.next_rows(before, train_step=0)
    written += [
        choice for index, choice in enumerate(first.next_rows(8, train_step=1)) if index not in lost
    ]
    second = PromptSampler(stream_of(1000), filters, block_rows=block_rows)
    for choice in written:
        for row in (choice.row, *choice.skipped):
            second.mark_used(row)
    resumed = second.next_rows(60, train_step=1)
    known = everything([*written, *resumed])
    assert len(known) == len(set(known))
    done = min(second.floor, 1000)
    assert set(range(done)) <= set(known)
    alone = PromptSampler(stream_of(1000), filters, block_rows=block_rows).next_rows(
        len(written) + 60, train_step=1
    )
    if not lost:
        assert [choice.row for choice in [*written, *resumed]] == [choice.row for choice in alone]


def test_earlier_rewards_filter_rows_in_the_next_epoch() -> None:
    sampler = PromptSampler(stream_of(4), [PassRateFilter(0.1, 0.9)])
    assert [choice.row for choice in sampler.next_rows(4, train_step=0)] == [0, 1, 2, 3]
    for row, reward in enumerate((0.5, 0.0, 1.0, 0.9)):
        sampler.add_reward(row, reward)
    (first, second) = sampler.next_rows(2, train_step=1)
    assert (first.row, dict(first.skipped)) == (4, {})
    assert (second.row, dict(second.skipped)) == (
        7,
        {5: "pass_rate_too_low", 6: "pass_rate_too_high"},
    )


@pytest.mark.parametrize(("block_rows", "floor", "rows"), [(1, 7, [7, 9, 10]), (4, 9, [9, 10, 11])])
def test_rows_deleted_from_the_log_are_never_issued(
    block_rows: int, floor: int, rows: list[int]
) -> None:
    sampler = PromptSampler(stream_of(10), block_rows=block_rows)
    for row in (3, 5, 6, 8):
        sampler.mark_used(row)
    sampler.skip_to_block(5)
    assert sampler.floor == floor
    assert [choice.row for choice in sampler.next_rows(3, train_step=0)] == rows


def test_filters_that_skip_everything_fail() -> None:
    sampler = PromptSampler(stream_of(3), [lambda row, *, mean_rewards, train_step: "never"])
    with pytest.raises(
        ConfigError,
        match=r"7 prompts in a row were skipped \(never\); widen data.min_prompt_tokens",
    ):
        sampler.next_rows(1, train_step=0)
