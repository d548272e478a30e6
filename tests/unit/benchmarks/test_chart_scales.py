"""The scales of charts: round ticks, and short curves of long runs."""

import pytest

from benchmarks.chart_scales import bucket_curve, format_number, moving_mean, ticks


def test_bucket_curve_keeps_mean_minimum_and_maximum() -> None:
    first, second = bucket_curve([3, 4, 5, 6], [1.0, 3.0, None, None], limit=2)
    assert (first.first, first.last, first.mean, first.low, first.high) == (3, 4, 2.0, 1.0, 3.0)
    assert (second.mean, second.low, second.high) == (None, None, None)


def test_moving_mean_averages_the_known_neighbours() -> None:
    assert moving_mean([0.0, 3.0, None, 9.0], reach=1) == [1.5, 1.5, 6.0, 9.0]
    assert moving_mean([None], reach=3) == [None]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 1.0, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (-0.013, 0.021, [-0.01, 0.0, 0.01, 0.02]),
        (0.0, 480.0, [0.0, 100.0, 200.0, 300.0, 400.0]),
    ],
)
def test_axis_ticks_are_round_numbers(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


def test_axis_ticks_are_integers_for_steps_and_finite_for_extreme_ranges() -> None:
    assert ticks(0, 3, count=6, integral=True) == [0, 1, 2, 3]
    assert ticks(0, 0, integral=True) == [0]
    assert ticks(-1e308, 1.7e308) == [-1e308]


def test_short_number_fits_an_axis() -> None:
    numbers = [0.0, -0.0, 0.1 + 0.2, 1234.0, 12_500.0, 3.2e6, 4e9, -20_000.0, 1e-5]
    assert [format_number(number) for number in numbers] == [
        "0",
        "0",
        "0.3",
        "1234",
        "12.5k",
        "3.2M",
        "4G",
        "-20k",
        "1e-05",
    ]
