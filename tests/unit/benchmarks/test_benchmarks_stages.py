"""The costs of stages: what is between two looks, divided by the samples between them."""

from __future__ import annotations

import os

import psutil
import pytest

from benchmarks import stages
from benchmarks.stages import Look, Steady, Used


def test_cost_is_what_was_used_between_two_looks_a_sample() -> None:
    here, other = psutil.Process(), psutil.Process(os.getppid())
    first = Look(10, 100.0, {here: ("trainer", Used(1.0, 0.5, 100, 10))})
    last = Look(
        12,
        100.5,
        {
            here: ("trainer", Used(2.024, 1.012, 612, 266)),
            other: ("trainer", Used(0.512, 0.0, 0, 0)),  # started in between
        },
    )
    steady = stages.between(first, last)
    used = steady.used["trainer"]
    assert steady.rate == pytest.approx(1024)
    assert (used.user, used.system) == pytest.approx((0.003, 0.001))
    assert (used.voluntary, used.involuntary) == pytest.approx((1.0, 0.5))


def test_rows_have_medians_of_both_checkouts_and_the_sum() -> None:
    after = [
        Steady(1.0, {"broker": Used(user), "trainer": Used(0.001)})
        for user in (0.002, 0.004, 0.003)
    ]
    before = [Steady(1.0, {"broker": Used(0.005), "trainer": Used(0.002)})] * 3
    found = {row["role"]: row for row in stages.rows(after, before)}
    assert list(found) == ["all", "broker", "trainer"]
    assert found["broker"]["ms a sample"] == "3.000"
    assert found["all"]["ms a sample, before"] == "7.000"
    assert "ms a sample, before" not in stages.rows(after)[0]


def test_ratios_compare_runs_of_the_same_round() -> None:
    after = [Steady(600.0, {"broker": Used(0.002)}), Steady(400.0, {"broker": Used(0.004)})]
    before = [Steady(300.0, {"broker": Used(0.004)})] * 2
    assert stages.rate_rows({"async": after}, {"async": before}) == [
        {
            "setting": "async",
            "trained a second": "500",
            "before": "300",
            "a sample takes, of before": "0.75 (0.50 to 1.00)",
        }
    ]
