"""The arithmetic of charts: ticks, labels, and buckets of long curves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

ROUND_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Neighbouring steps that are plotted as one point; without a known value `mean`, `low` and
    `high` are None.
    """

    first: int
    last: int
    mean: float | None
    low: float | None
    high: float | None

    @property
    def name(self) -> str:
        """The steps as text."""
        return (
            f"step {self.first}"
            if self.first == self.last
            else f"steps {self.first} to {self.last}"
        )

    @property
    def middle(self) -> float:
        """Its position on the axis of steps."""
        return (self.first + self.last) / 2


def bucket_curve(
    steps: Sequence[int], values: Sequence[float | None], *, limit: int
) -> list[Bucket]:
    """Group a curve into at most `limit` buckets of equally many steps; short curves have one step
    a bucket.
    """
    size = max(math.ceil(len(steps) / limit), 1)
    buckets = []
    for start in range(0, len(steps), size):
        names = steps[start : start + size]
        known = [value for value in values[start : start + size] if value is not None]
        average = math.fsum(value / len(known) for value in known) if known else None
        buckets.append(
            Bucket(names[0], names[-1], average, min(known, default=None), max(known, default=None))
        )
    return buckets


def moving_mean(values: Sequence[float | None], *, reach: int) -> list[float | None]:
    """Return the centred moving mean over `reach` neighbours to each side; the window is cut at the
    ends, unknown values are ignored.
    """
    means: list[float | None] = []
    for index in range(len(values)):
        known = [
            value
            for value in values[max(index - reach, 0) : index + reach + 1]
            if value is not None
        ]
        means.append(math.fsum(known) / len(known) if known else None)
    return means


def ticks(low: float, high: float, *, count: int = 5, integral: bool = False) -> list[float]:
    """Return round numbers within a range, about `count` of them; integers if `integral`."""
    if not math.isfinite(high - low) or high <= low:
        return [low]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(
        multiple * power for multiple in ROUND_STEPS if multiple * power >= raw * (1 - 1e-9)
    )
    step = max(math.ceil(step), 1) if integral else step
    return [
        index * step
        for index in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    ]


def format_number(value: float, *, digits: int = 6) -> str:
    """Format a number briefly for an axis, with at most so many significant digits."""
    for size, unit, letter in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= size:
            return f"{value / unit:.{digits}g}{letter}"
    return f"{value:.{digits}g}" if value else "0"
