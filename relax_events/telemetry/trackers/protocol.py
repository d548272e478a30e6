"""What a tracker is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from relax_events.config import RunConfig
from relax_events.telemetry.trackers.progress import DeliveryProgress

MICROS = 1e6


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """Figures of one step of a series. Steps of a series come in order, each once.

    Attributes:
        series: `train`, `phase_seconds`, `critic`, or `evaluation/` and the dataset's name.
        step: The train step, or the policy version that was evaluated.
        at: When they became known, in microseconds since the epoch.
        values: By name.
    """

    series: str
    step: int
    at: int
    values: Mapping[str, float]


class Tracker(Protocol):
    """Takes figures; used by one thread. Any error is the tracker's own: it is counted, and the
    figures are given again later.
    """

    remembers: bool
    """Whether what an earlier process wrote is still there: then it is not written again."""

    def __init__(self, config: RunConfig, memory: DeliveryProgress) -> None:
        """Connect to it, and take the run up there if it is known."""
        ...

    def write(self, figures: StepMetrics) -> None:
        """Write the figures of a step."""
        ...

    def close(self) -> None:
        """Bring out what was kept back."""
        ...
