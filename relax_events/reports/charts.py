"""Charts as inline SVG, without a library so that the page needs nothing else: curves, bars,
stacked bars.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from relax_events.reports.chart_scales import (
    Bucket,
    bucket_curve,
    domain,
    format_number,
    moving_mean,
    ticks,
)

WIDTH, HEIGHT = 480, 220
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 12, 38
MAX_POINTS = 240
MAX_BARS = 120
MAX_DOTTED = 40
NUM_COLOURS = 8
BASE_LINE = (
    f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{HEIGHT - BOTTOM}" '
    f'y2="{HEIGHT - BOTTOM}"/>'
)


@dataclass(frozen=True, slots=True)
class Frame:
    """The plane of a chart: maps data to pixels, and draws axes with ticks."""

    left: float
    right: float
    low: float
    high: float

    def x(self, value: float) -> float:
        """Map a value to the horizontal axis; a range of one point is centred."""
        share = (value - self.left) / (self.right - self.left) if self.right > self.left else 0.5
        return round(LEFT + share * (WIDTH - LEFT - RIGHT), 2)

    def y(self, value: float) -> float:
        """Map a value to the vertical axis."""
        share = (value - self.low) / (self.high - self.low)
        return round(HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM), 2)

    def vertical(self) -> str:
        """Draw the vertical axis: a line and a number per tick."""
        return "".join(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{self.y(tick)}" '
            f'y2="{self.y(tick)}"/>'
            f'<text class="tick" x="{LEFT - 6}" y="{self.y(tick) + 4}" '
            f'text-anchor="end">{format_number(tick)}</text>'
            for tick in ticks(self.low, self.high)
        )

    def horizontal(self, name: str) -> str:
        """Draw the horizontal axis: a mark and a number per tick, and its name."""
        base = HEIGHT - BOTTOM
        marks = "".join(
            f'<line class="axis" x1="{self.x(tick)}" x2="{self.x(tick)}" y1="{base}" '
            f'y2="{base + 4}"/>'
            f'<text class="tick" x="{self.x(tick)}" y="{base + 16}" '
            f'text-anchor="middle">{format_number(tick)}</text>'
            for tick in ticks(self.left, self.right, count=6, integral=True)
        )
        return f"{BASE_LINE}{marks}{axis_name(name)}"


def axis_name(name: str) -> str:
    """Draw the name of the horizontal axis."""
    return (
        f'<text class="tick" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 4}" '
        f'text-anchor="middle">{escape(name)}</text>'
    )


def chart_element(title: str, text: str, body: str) -> str:
    """Wrap a drawing with its caption; the SVG carries both for screen readers."""
    head = f"<figcaption><b>{escape(title)}</b> {escape(text)}</figcaption>"
    svg = (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'role="img"><title>{escape(title)}</title><desc>{escape(text)}</desc>{body}</svg>'
    )
    return f"<figure>{head}{svg}</figure>"


def no_data() -> str:
    """Draw a note that there is no data."""
    return (
        f'<text class="empty" x="{WIDTH / 2}" y="{HEIGHT / 2}" text-anchor="middle">no data</text>'
    )


def line_chart(
    title: str,
    text: str,
    steps: Sequence[int],
    values: Sequence[float | None],
    *,
    smooth: bool = False,
    reference: Sequence[float | None] | None = None,
    reference_name: str = "",
) -> str:
    """Draw a curve over train steps, with a tooltip for each point.

    Above `MAX_POINTS` steps, neighbours are plotted as their mean, over a band from the lowest to
    the highest. The line is interrupted where a value is unknown.

    Args:
        title: Of the chart.
        text: Its definition, and its unit.
        steps: Train steps, ascending.
        values: One for each step.
        smooth: Draw the curve pale, and its moving mean over a tenth of the steps on top (buckets
            are smooth already).
        reference: Another run's values at the same steps, plotted dashed behind the curve.
        reference_name: That run, for the caption.
    """
    others = [] if reference is None else bucket_curve(steps, reference, limit=MAX_POINTS)
    text = text if reference is None else f"{text}; dashed: run {reference_name}"
    buckets = bucket_curve(steps, values, limit=MAX_POINTS)
    lows, highs = (
        [bucket.low for bucket in buckets if bucket.low is not None],
        [bucket.high for bucket in buckets if bucket.high is not None],
    )
    if not lows:
        return chart_element(title, text, no_data())
    means = [other.mean for other in others]
    low, high = domain([*lows, *highs, *(mean for mean in means if mean is not None)])
    frame = Frame(steps[0], steps[-1], low, high)
    strong = [bucket.mean for bucket in buckets]
    parts = [frame.vertical(), frame.horizontal("train step")]
    if others:
        shown = moving_mean(means, reach=max(len(others) // 20, 1)) if smooth else means
        parts.append(f'<path class="line reference" d="{path(frame, others, shown)}"/>')
    if len(buckets) < len(steps):
        parts.append(f'<path class="band" d="{band(frame, buckets)}"/>')
    elif smooth and len(buckets) > 2:
        parts.append(f'<path class="line pale" d="{path(frame, buckets, strong)}"/>')
        strong = moving_mean(strong, reach=max(len(buckets) // 20, 1))
    parts.append(f'<path class="line" d="{path(frame, buckets, strong)}"/>')
    parts += points(frame, buckets)
    return chart_element(title, text, "".join(parts))


def path(frame: Frame, buckets: Sequence[Bucket], values: Sequence[float | None]) -> str:
    """Return a path through known values, interrupted at unknown ones."""
    words = []
    pen = "M"
    for bucket, value in zip(buckets, values, strict=True):
        if value is None:
            pen = "M"
            continue
        words.append(f"{pen}{frame.x(bucket.middle)},{frame.y(value)}")
        pen = "L"
    return "".join(words)


def band(frame: Frame, buckets: Sequence[Bucket]) -> str:
    """Return the outline along the highest values, and back along the lowest."""
    known = [
        (frame.x(bucket.middle), bucket.low, bucket.high)
        for bucket in buckets
        if bucket.low is not None and bucket.high is not None
    ]
    corners = [(x, high) for x, _, high in known] + [(x, low) for x, low, _ in reversed(known)]
    return "M" + "L".join(f"{x},{frame.y(value)}" for x, value in corners) + "Z"


def points(frame: Frame, buckets: Sequence[Bucket]) -> list[str]:
    """Draw a point for each known value with its tooltip; visible where they are few, otherwise
    under the pointer.
    """
    width = (WIDTH - LEFT - RIGHT) / len(buckets)
    kind = "dot" if len(buckets) <= MAX_DOTTED else "dot hidden"
    marks = []
    for bucket in buckets:
        if bucket.mean is None:
            continue
        x = frame.x(bucket.middle)
        spread = (
            ""
            if bucket.first == bucket.last
            else f" ({format_number(bucket.low or 0.0)} to {format_number(bucket.high or 0.0)})"
        )
        marks.append(
            f'<g><rect class="hit" x="{x - width / 2:.2f}" y="{TOP}" width="{width:.2f}" '
            f'height="{HEIGHT - TOP - BOTTOM}"/>'
            f'<circle class="{kind}" cx="{x}" cy="{frame.y(bucket.mean)}" r="2.5"/>'
            f"<title>{bucket.name}: {format_number(bucket.mean)}{spread}</title></g>"
        )
    return marks


def bar_chart(title: str, text: str, bars: Mapping[str, float], *, axis: str) -> str:
    """Draw a bar for each name, with its value above it and its share as tooltip."""
    total = sum(bars.values())
    if not total:
        return chart_element(title, text, no_data())
    frame = Frame(0, len(bars), 0.0, max(bars.values()) * 1.1)
    width = (WIDTH - LEFT - RIGHT) / len(bars)
    parts = [
        frame.vertical(),
        (
            f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{HEIGHT - BOTTOM}" '
            f'y2="{HEIGHT - BOTTOM}"/>'
        ),
        axis_name(axis),
    ]
    for index, (name, value) in enumerate(bars.items()):
        centre, top = LEFT + (index + 0.5) * width, frame.y(value)
        thick = min(width * 0.7, 60)
        parts.append(
            f'<g><rect class="c0" x="{centre - thick / 2:.2f}" y="{top}" width="{thick:.2f}" '
            f'height="{HEIGHT - BOTTOM - top:.2f}"/>'
            f"<title>{escape(name)}: {format_number(value)} ({value / total:.1%})</title></g>"
        )
        if len(bars) <= 12:
            parts.append(
                f'<text class="value" x="{centre:.2f}" y="{top - 4:.2f}" '
                f'text-anchor="middle">{format_number(value, digits=4)}</text>'
            )
        if index % max(len(bars) // 12, 1) == 0:
            parts.append(
                f'<text class="tick" x="{centre:.2f}" y="{HEIGHT - BOTTOM + 16}" '
                f'text-anchor="middle">{escape(name)}</text>'
            )
    return chart_element(title, text, "".join(parts))


def stacked_chart(
    title: str, text: str, steps: Sequence[int], layers: Mapping[str, Sequence[float]]
) -> str:
    """Draw a bar for each step (or for the mean of neighbours, above `MAX_BARS` steps), stacked
    from the layers.

    Args:
        title: Of the chart.
        text: Its definition, and its unit.
        steps: Train steps, ascending.
        layers: Values by name, one for each step, none below 0; the first is at the bottom.
    """
    columns = {name: bucket_curve(steps, values, limit=MAX_BARS) for name, values in layers.items()}
    buckets = next(iter(columns.values()), [])
    sums = [
        sum(column[index].mean or 0.0 for column in columns.values())
        for index in range(len(buckets))
    ]
    if not any(sums):
        return chart_element(title, text, no_data())
    half = max((steps[-1] - steps[0]) / len(buckets), 1) / 2
    frame = Frame(steps[0] - half, steps[-1] + half, 0.0, max(sums))
    width = (WIDTH - LEFT - RIGHT) / len(buckets)
    gap = min(width * 0.15, 4)
    parts = [frame.vertical(), frame.horizontal("train step")]
    floors = [0.0] * len(buckets)
    for colour, (name, column) in enumerate(columns.items()):
        for index, bucket in enumerate(column):
            value = bucket.mean or 0.0
            top, bottom = frame.y(floors[index] + value), frame.y(floors[index])
            floors[index] += value
            hover = (
                f"<title>{bucket.name}, {escape(name)}: {format_number(value, digits=4)}</title>"
            )
            parts.append(
                f'<rect class="c{colour % NUM_COLOURS}" '
                f'x="{LEFT + index * width + gap / 2:.2f}" y="{top}" '
                f'width="{width - gap:.2f}" height="{bottom - top:.2f}">{hover}</rect>'
            )
    return chart_element(title, text, "".join(parts))


def shares_bar(shares: Mapping[str, float]) -> str:
    """Draw the shares of a total as one bar, in the colours of `stacked_chart`."""
    total = sum(shares.values())
    if not total:
        return ""
    parts, left = [], 0.0
    for colour, (name, value) in enumerate(shares.items()):
        width = value / total * 100
        parts.append(
            f'<rect class="c{colour % NUM_COLOURS}" x="{left:.3f}" y="0" width="{width:.3f}" '
            'height="4">'
            f"<title>{escape(name)}: {format_number(value, digits=4)} "
            f"({value / total:.1%})</title></rect>"
        )
        left += width
    title = "".join(f"{name} {value / total:.0%} " for name, value in shares.items())
    return (
        '<svg class="shares" viewBox="0 0 100 4" preserveAspectRatio="none" '
        f'role="img"><title>{escape(title)}</title>{"".join(parts)}</svg>'
    )
