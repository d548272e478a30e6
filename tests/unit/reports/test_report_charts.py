"""Charts: a mark per step, round ticks, short curves of long runs, and escaped text."""

import math
from xml.etree import ElementTree as ET

import pytest

from relax_events.reports.chart_scales import (
    bucket_curve,
    domain,
    format_number,
    moving_mean,
    ticks,
)
from relax_events.reports.charts import (
    MAX_BARS,
    MAX_POINTS,
    bar_chart,
    line_chart,
    shares_bar,
    stacked_chart,
)

HOSTILE = '<script>alert("x")</script>'


def marks(drawing: str, tag: str, kind: str | None = None) -> list[ET.Element]:
    """Return a drawing's elements of a tag, and of a class if given; parsing also proves that it is
    well-formed."""
    found = ET.fromstring(drawing).iter(tag)
    return [mark for mark in found if kind is None or kind in mark.get("class", "").split()]


def hover(drawing: str) -> list[str]:
    return [
        text for title in marks(drawing, "title") if (text := title.text or "").startswith("step")
    ]


def test_line_chart_has_a_point_per_step_with_its_exact_step_and_value() -> None:
    drawing = line_chart("Reward", "mean", [0, 1, 2], [0.25, 0.5, 0.125])
    assert hover(drawing) == ["step 0: 0.25", "step 1: 0.5", "step 2: 0.125"]
    circles = marks(drawing, "circle", "dot")
    across = [float(circle.get("cx", "nan")) for circle in circles]
    down = [float(circle.get("cy", "nan")) for circle in circles]
    assert across == [58.0, 263.0, 468.0]
    assert down[1] < down[0] < down[2]  # higher values are higher up
    assert (down[0] - down[1]) / (down[2] - down[0]) == pytest.approx(2.0, abs=0.01)


def test_line_chart_shows_a_single_step_in_the_middle() -> None:
    drawing = line_chart("Loss", "", [7], [0.5], smooth=True)
    (circle,) = marks(drawing, "circle")
    assert (circle.get("cx"), circle.get("class")) == ("263.0", "dot")
    assert hover(drawing) == ["step 7: 0.5"]


@pytest.mark.parametrize("values", [[], [None, None]])
def test_line_chart_shows_no_data_when_empty(values: list[float | None]) -> None:
    drawing = line_chart("Loss", "", list(range(len(values))), values, smooth=True)
    assert [text.text for text in marks(drawing, "text")] == ["no data"]


def test_line_chart_leaves_a_gap_at_a_missing_value() -> None:
    drawing = line_chart("KL", "", [0, 1, 2, 3, 4], [1.0, 2.0, None, 3.0, 4.0])
    (line,) = marks(drawing, "path", "line")
    assert [letter for letter in line.get("d", "") if letter.isalpha()] == ["M", "L", "M", "L"]
    assert len(marks(drawing, "circle")) == 4


def test_line_chart_shows_raw_and_smoothed_when_asked() -> None:
    drawing = line_chart(
        "Reward", "", list(range(20)), [float(step % 2) for step in range(20)], smooth=True
    )
    raw, strong = marks(drawing, "path", "line")
    assert "pale" in raw.get("class", "")
    heights = [float(pair.split(",")[1]) for pair in strong.get("d", "")[1:].split("L")]
    assert max(heights) - min(heights) < 80  # the raw curve jumps over 158 pixels


def test_line_chart_buckets_ten_thousand_steps() -> None:
    drawing = line_chart(
        "Reward", "", list(range(10_000)), [step / 10_000 for step in range(10_000)], smooth=True
    )
    texts = hover(drawing)
    assert len(texts) <= MAX_POINTS
    assert texts[0] == "steps 0 to 41: 0.00205 (0 to 0.0041)"
    assert texts[-1].startswith("steps 9996 to 9999: ")
    assert len(marks(drawing, "path", "band")) == 1
    assert len(drawing) < 100_000


def test_bar_chart_draws_values_in_proportion() -> None:
    drawing = bar_chart("Staleness", "", {"0": 10, "1": 30, "2": 0}, axis="versions")
    heights = [float(bar.get("height", "nan")) for bar in marks(drawing, "rect", "c0")]
    assert heights[1] == pytest.approx(3 * heights[0], rel=0.01)
    assert heights[2] == 0
    assert [text.text for text in marks(drawing, "text", "value")] == ["10", "30", "0"]
    assert "0: 10 (25.0%)" in drawing


def test_bar_chart_shows_no_data_when_all_values_are_zero() -> None:
    assert "no data" in bar_chart("Staleness", "", {"0": 0}, axis="versions")
    assert "no data" in bar_chart("Staleness", "", {}, axis="versions")


def test_stacked_chart_stacks_its_layers() -> None:
    drawing = stacked_chart("Time", "", [0, 1], {"wait": [1.0, 2.0], "update": [1.0, 0.0]})
    wait, update = marks(drawing, "rect", "c0"), marks(drawing, "rect", "c1")
    assert len(wait) == len(update) == 2
    assert float(update[0].get("y", "nan")) + float(
        update[0].get("height", "nan")
    ) == pytest.approx(float(wait[0].get("y", "nan")))
    assert float(wait[1].get("height", "nan")) == pytest.approx(
        2 * float(wait[0].get("height", "nan")), abs=0.02
    )
    assert "step 1, wait: 2" in drawing


def test_stacked_chart_buckets_many_steps_and_handles_none() -> None:
    long = stacked_chart("Time", "", list(range(10_000)), {"wait": [1.0] * 10_000})
    assert len(marks(long, "rect")) <= MAX_BARS
    assert "no data" in stacked_chart("Time", "", [], {})
    assert "no data" in stacked_chart("Time", "", [0], {"wait": [0.0]})


def test_shares_bar_adds_up_to_the_whole() -> None:
    drawing = shares_bar({"wait": 3.0, "update": 1.0})
    assert [float(bar.get("width", "nan")) for bar in marks(drawing, "rect")] == [75.0, 25.0]
    assert shares_bar({}) == ""


def test_charts_escape_hostile_names() -> None:
    drawings = [
        line_chart(HOSTILE, HOSTILE, [0], [1.0]),
        bar_chart(HOSTILE, HOSTILE, {HOSTILE: 1}, axis=HOSTILE),
        stacked_chart(HOSTILE, HOSTILE, [0], {HOSTILE: [1.0]}),
        shares_bar({HOSTILE: 1.0}),
    ]
    for drawing in drawings:
        assert "<script" not in drawing
        assert "&lt;script&gt;" in drawing
        assert marks(drawing, "script") == []


def test_charts_have_title_and_description_for_screen_readers() -> None:
    drawing = line_chart("Reward", "mean of the samples", [0], [1.0])
    (image,) = marks(drawing, "svg")
    assert image.get("role") == "img"
    assert (image[0].tag, image[0].text) == ("title", "Reward")
    assert (image[1].tag, image[1].text) == ("desc", "mean of the samples")


def test_bucket_curve_keeps_mean_minimum_and_maximum() -> None:
    first, second = bucket_curve([3, 4, 5, 6], [1.0, 3.0, None, None], limit=2)
    assert (first.first, first.last, first.mean, first.low, first.high) == (3, 4, 2.0, 1.0, 3.0)
    assert (second.mean, second.low, second.high) == (None, None, None)


def test_moving_mean_averages_the_known_neighbours() -> None:
    assert moving_mean([0.0, 3.0, None, 9.0], reach=1) == [1.5, 1.5, 6.0, 9.0]
    assert moving_mean([None], reach=3) == [None]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], (0.0, 1.0)),
        ([0.0], (0.0, 1.0)),
        ([10.0, 10.0], (9.0, 11.0)),
        ([-1.0, 1.0], (-1.08, 1.08)),
        ([0.01, 1.01], (0.0, 1.05)),
    ],
)
def test_domain_leaves_a_margin(values: list[float], expected: tuple[float, float]) -> None:
    assert domain(values) == pytest.approx(expected)


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
    assert all(math.isfinite(tick) for tick in ticks(*domain([1e-310, 2e-310])))


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
