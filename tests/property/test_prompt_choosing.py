"""Each row is taken once, whatever the order that a hook gives and wherever a prompter dies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_events.data.prompt_filter import Judge, PassRateJudge, Verdict
from relax_events.data.prompt_sampler import Choice, PromptChooser
from relax_events.data.rows import PromptRow, UnfitRows
from relax_events.data.stream import PromptStream
from relax_events.errors import ConfigError

BLOCKS = st.integers(min_value=1, max_value=9)
SIZES = st.integers(min_value=1, max_value=60)


@dataclass
class Numbers:
    """A source whose rows answer their own number."""

    rows: int
    unfit: UnfitRows = field(default_factory=lambda: UnfitRows("data"))

    def row(self, index: int) -> PromptRow:
        return PromptRow([], str(index))


def stream_of(rows: int) -> PromptStream:
    return PromptStream(Numbers(rows), seed=5, shuffle=False)


def backwards(row: PromptRow, *, mean_rewards: Sequence[float], train_step: int) -> Verdict:
    """Put high numbers first, and pass over every fifth row."""
    number = int(row.answer)
    return "fifth" if number % 5 == 4 else float(-number)


def everything(choices: Sequence[Choice]) -> list[int]:
    return sorted(row for choice in choices for row in (choice.row, *choice.passed_over))


@given(
    rows=SIZES,
    first=st.integers(min_value=0, max_value=50),
    counts=st.lists(st.integers(min_value=0, max_value=20), max_size=6),
)
def test_rows_come_in_the_order_of_the_stream_without_judges(
    rows: int, first: int, counts: list[int]
) -> None:
    chooser = PromptChooser(stream_of(rows), first_row=first)
    taken = [choice for count in counts for choice in chooser.take(count, train_step=0)]
    assert taken == [Choice(row) for row in range(first, first + sum(counts))]


@given(
    rows=st.integers(min_value=8, max_value=60),
    block_rows=BLOCKS,
    counts=st.lists(st.integers(min_value=1, max_value=10), min_size=1, max_size=6),
)
def test_hook_orders_within_blocks_and_every_row_is_taken_or_passed_over_once(
    rows: int, block_rows: int, counts: list[int]
) -> None:
    chooser = PromptChooser(stream_of(rows), [backwards], block_rows=block_rows)
    choices = [choice for count in counts for choice in chooser.take(count, train_step=0)]
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
        for row, reason in choice.passed_over.items()
    )


@given(
    block_rows=BLOCKS,
    before=st.integers(min_value=0, max_value=40),
    lost=st.sets(st.integers(min_value=0, max_value=7), max_size=7),
    judged=st.booleans(),
)
def test_prompter_that_starts_again_loses_no_row_and_takes_none_twice(
    block_rows: int, before: int, lost: set[int], judged: bool
) -> None:
    judges: list[Judge] = [backwards] if judged else []
    first = PromptChooser(stream_of(1000), judges, block_rows=block_rows)
    written = first.take(before, train_step=0)
    written += [
        choice for place, choice in enumerate(first.take(8, train_step=1)) if place not in lost
    ]
    second = PromptChooser(stream_of(1000), judges, block_rows=block_rows)
    for choice in written:
        for row in (choice.row, *choice.passed_over):
            second.mark(row)
    resumed = second.take(60, train_step=1)
    known = everything([*written, *resumed])
    assert len(known) == len(set(known))
    done = min(second.floor, 1000)
    assert set(range(done)) <= set(known)
    alone = PromptChooser(stream_of(1000), judges, block_rows=block_rows).take(
        len(written) + 60, train_step=1
    )
    if not lost:
        assert [choice.row for choice in [*written, *resumed]] == [choice.row for choice in alone]


def test_rewards_of_the_past_decide_about_rows_that_come_round_again() -> None:
    chooser = PromptChooser(stream_of(4), [PassRateJudge(0.1, 0.9)])
    assert [choice.row for choice in chooser.take(4, train_step=0)] == [0, 1, 2, 3]
    for row, reward in enumerate((0.5, 0.0, 1.0, 0.9)):
        chooser.note_reward(row, reward)
    (first, second) = chooser.take(2, train_step=1)
    assert (first.row, dict(first.passed_over)) == (4, {})
    assert (second.row, dict(second.passed_over)) == (
        7,
        {5: "pass_rate_too_low", 6: "pass_rate_too_high"},
    )


@pytest.mark.parametrize(("block_rows", "floor", "rows"), [(1, 7, [7, 9, 10]), (4, 9, [9, 10, 11])])
def test_rows_that_the_log_tells_no_more_are_never_taken(
    block_rows: int, floor: int, rows: list[int]
) -> None:
    chooser = PromptChooser(stream_of(10), block_rows=block_rows)
    for row in (3, 5, 6, 8):
        chooser.mark(row)
    chooser.begin_at_block_of(5)
    assert chooser.floor == floor
    assert [choice.row for choice in chooser.take(3, train_step=0)] == rows


def test_judges_that_pass_over_everything_end_the_search() -> None:
    chooser = PromptChooser(stream_of(3), [lambda row, *, mean_rewards, train_step: "never"])
    with pytest.raises(
        ConfigError,
        match=r"7 prompts in a row were passed over \(never\); widen data.min_prompt_tokens",
    ):
        chooser.take(1, train_step=0)
