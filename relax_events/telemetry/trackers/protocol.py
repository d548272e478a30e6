"""The protocol of experiment trackers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from relax_events.config import RunConfig
from relax_events.telemetry.trackers.progress import DeliveryProgress

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
    """Whether the tracker keeps what earlier processes wrote, so that it is not written again."""

    def __init__(self, config: RunConfig, memory: DeliveryProgress) -> None:
        """Connect to the tracker, and resume the run if it is known there."""
        ...

    def write(self, step_metrics: StepMetrics) -> None:
        """Write the metrics of a step."""
        ...

    def close(self) -> None:
        """Send pending metrics and close the tracker."""
        ...
