"""Reward curves of many runs as one SVG of small multiples, on the axes of a run's report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from benchmarks.chart_frame import HEIGHT, LEFT, WIDTH, Frame, path
from benchmarks.chart_scales import bucket_curve, moving_mean

NUM_COLUMNS = 3
CELL_WIDTH, HEAD_HEIGHT, GAP = 320, 26, 14
CELL_HEIGHT = HEAD_HEIGHT + CELL_WIDTH * HEIGHT // WIDTH
REACH = 2
HEADROOM = 1.05
STYLE = """
svg { background: #ffffff; font-family: system-ui, sans-serif; }
.name { font-size: 14px; font-weight: 600; fill: #1b1f24; }
.note { font-size: 12px; fill: #5b6570; }
.tick { font-size: 16px; fill: #5b6570; }
.grid { stroke: #dfe3e8; }
.axis { stroke: #5b6570; }
.line { fill: none; stroke: #2f6fde; stroke-width: 3; stroke-linejoin: round; }
.pale { stroke-width: 1.4; opacity: .45; }
"""


@dataclass(frozen=True, slots=True)
class Curve:
    """The rewards of one run by train step."""

    steps: Sequence[int]
    rewards: Sequence[float | None]


def small_multiples(
    panels: Mapping[str, Sequence[Curve]], *, title: str, own_axes: bool = False
) -> str:
    """Draw a panel for each name: its runs pale, their moving mean strong, all on the same axes.

    Args:
        panels: The runs of each, at least one panel and one run in each.
        title: Of the whole, for readers that do not see it.
        own_axes: Let each panel begin at 0 and end a little above its own values, for panels of
            different things.
    Returns:
        An SVG file that needs nothing else.
    """
    last = max(curve.steps[-1] for curves in panels.values() for curve in curves)
    known = {
        name: [reward for curve in curves for reward in curve.rewards if reward is not None]
        for name, curves in panels.items()
    }
    rewards = [0.0, 1.0, *(reward for values in known.values() for reward in values)]
    common = Frame(0, last, min(rewards), max(rewards))
    frames = {
        name: Frame(0, last, min(0.0, *values), HEADROOM * max(values) or 1.0)
        if own_axes
        else common
        for name, values in known.items()
    }
    num_rows = -(-len(panels) // NUM_COLUMNS)
    width, height = NUM_COLUMNS * (CELL_WIDTH + GAP) + GAP, num_rows * (CELL_HEIGHT + GAP) + GAP
    cells = "".join(
        cell(index, name, curves, frames[name])
        for index, (name, curves) in enumerate(panels.items())
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'role="img"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style>{cells}</svg>\n"
    )


def cell(index: int, name: str, curves: Sequence[Curve], frame: Frame) -> str:
    """Draw a panel in its cell of the grid."""
    row, column = divmod(index, NUM_COLUMNS)
    left, top = GAP + column * (CELL_WIDTH + GAP), GAP + row * (CELL_HEIGHT + GAP)
    pale = "".join(f'<path class="line pale" d="{draw_path(frame, curve)}"/>' for curve in curves)
    strong = f'<path class="line" d="{draw_path(frame, mean_curve(curves))}"/>'
    inner = f"{frame.vertical()}{frame.horizontal('train step')}{pale}{strong}"
    head = (
        f'<text class="name" x="{left + CELL_WIDTH * LEFT / WIDTH:.1f}" '
        f'y="{top + 18}">{escape(name)}</text>'
    )
    body_height = CELL_HEIGHT - HEAD_HEIGHT
    size = f'width="{CELL_WIDTH}" height="{body_height}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    return f'{head}<svg x="{left}" y="{top + HEAD_HEIGHT}" {size}>{inner}</svg>'


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """Return the moving mean of several runs' mean, over the steps of the longest."""
    rewards: dict[int, list[float]] = {}
    for curve in curves:
        for step, reward in zip(curve.steps, curve.rewards, strict=True):
            rewards.setdefault(step, []).extend([] if reward is None else [reward])
    steps = sorted(rewards)
    means = [sum(rewards[step]) / len(rewards[step]) if rewards[step] else None for step in steps]
    return Curve(steps, moving_mean(means, reach=REACH))


def draw_path(frame: Frame, curve: Curve) -> str:
    """Return a curve as the line of a path."""
    return path(
        frame, bucket_curve(curve.steps, curve.rewards, limit=len(curve.steps)), curve.rewards
    )
