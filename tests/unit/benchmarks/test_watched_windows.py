"""Windows of a run with pages and without are compared with their neighbours."""

from __future__ import annotations

import pytest

from benchmarks.watched import SETTLING_SECONDS, Window, interval, order_of, pair_ratios, rate


def test_sides_take_turns_so_that_a_drift_favours_neither() -> None:
    assert order_of(4) == [False, True, True, False, False, True, True, False]


def test_rate_counts_parts_of_steps() -> None:
    assert rate([0.0, 2.0, 4.0, 8.0], 1.0, 6.0) == pytest.approx((2.5 - 0.5) / 5.0)


def test_ratio_is_that_of_the_windows_behind_their_first_seconds() -> None:
    settled = SETTLING_SECONDS
    # steps take 1 s until 20 s, then 2 s; the first window is watched
    commits = [*map(float, range(21)), *map(float, range(22, 60, 2))]
    slow = Window(True, 20.0 - settled, 40.0, 0.0, 0.0)
    fast = Window(False, 0.0 - settled, 20.0, 0.0, 0.0)
    assert pair_ratios([slow, fast], commits) == pytest.approx([0.5])
    assert pair_ratios([fast, slow], commits) == pytest.approx([0.5])


def test_interval_holds_the_mean_and_narrows_with_more_pairs() -> None:
    few, many = [0.9, 1.1] * 5, [0.9, 1.1] * 100
    low, high = interval(few)
    assert low < (0.9 * 1.1) ** 0.5 < high
    assert interval(many)[1] - interval(many)[0] < (high - low) / 3
