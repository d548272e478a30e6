"""The plane of a chart as inline SVG: axes with ticks, and paths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from benchmarks.chart_scales import Bucket, format_number, ticks

WIDTH, HEIGHT = 480, 220
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 12, 38
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
