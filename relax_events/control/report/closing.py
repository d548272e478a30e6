"""The line with which a run that has reached its goal ends."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def closing_line(report: Mapping[str, Any], folder: Path) -> str:
    """Say what came of a run: its rewards, or its loss where nothing is rewarded, over all its steps and sessions.

    Args:
        report: As in `report.json`.
        folder: Where that is.
    """
    name, curve = ("loss", "loss") if report["reward_first"] is None else ("reward", "reward_mean")
    first, last = report["curves"][curve][0], report["curves"][curve][-1]
    text = f"{name} {first:.3f} -> {last:.3f} in {report['steps']} steps, {report['total_seconds']:.0f} s"
    if report["steps_of_session"] < report["steps"]:
        text += f" ({report['steps_of_session']} steps in {report['wall_seconds']:.0f} s since it was resumed)"
    return f"{text}; report: {folder / 'report.html'}"
