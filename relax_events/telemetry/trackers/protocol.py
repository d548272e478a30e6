"""The protocol of experiment trackers, and the record of the steps that each tracker has received,
so that a restarted metrics worker sends nothing twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import orjson

from relax_events.config import RunConfig


class DeliveryProgress:
    """The newest delivered step of each series, and a tracker's notes for its next process. A kill
    may lose only the newest entry.
    """

    def __init__(self, path: Path) -> None:
        """Read the file if it exists."""
        self._path = path
        self._held: dict[str, Any] = {"steps": {}, "notes": {}}
        if path.exists():
            self._held |= orjson.loads(path.read_bytes())

    def is_delivered(self, series: str, step: int) -> bool:
        """Return whether a step was delivered before."""
        return step <= int(self._held["steps"].get(series, -1))

    def mark_delivered(self, series: str, step: int) -> None:
        """Record that a step was delivered."""
        self._held["steps"][series] = step
        self._write()

    def get_note(self, name: str) -> str:
        """Return the note of a name; empty when there is none."""
        return str(self._held["notes"].get(name, ""))

    def set_note(self, name: str, text: str) -> None:
        """Store a note, such as the tracker's id for the run."""
        self._held["notes"][name] = text
        self._write()

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        newer = self._path.with_suffix(".new")
        newer.write_bytes(orjson.dumps(self._held))
        newer.replace(self._path)


MICROS = 1e6


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """The metrics of one step of a series. Steps of a series arrive in order, each once.

    Attributes:
        series: `train`, `phase_seconds`, `critic`, or `evaluation/` and the dataset's name.
        step: The train step, or the policy version that was evaluated.
        at: The time of the metrics, in microseconds since the epoch.
        values: The values by name.
    """

    series: str
    step: int
    at: int
    values: Mapping[str, float]


class Tracker(Protocol):
    """Receives metrics; used by one thread. Any exception is counted, and the metrics are sent
    again later.
    """

    remembers: bool
    """Whether the tracker keeps earlier processes' metrics, so that they are not written again."""

    def __init__(self, config: RunConfig, memory: DeliveryProgress) -> None:
        """Connect to the tracker, and resume the run if it is known there."""
        ...

    def write(self, step_metrics: StepMetrics) -> None:
        """Write the metrics of a step."""
        ...

    def close(self) -> None:
        """Send pending metrics and close the tracker."""
        ...
