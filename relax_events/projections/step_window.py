"""The newest train steps of a run, and how a metric moved over them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from relax_events.events.types import TrainStepCommitted
from relax_events.projections.run_state import MAX_KEPT

WINDOW_STEPS = MAX_KEPT
"""As many as every display keeps, so that all of them say the same."""
RECENT_STEPS = 20
MIN_STEPS = 10
"""With fewer steps nothing is said about a metric."""
RISE_ERRORS = 2.0
"""A change by so many standard errors is one of twenty by chance."""
FALL_WINDOW, FALL_ERRORS = 10, 3.0


@dataclass(frozen=True, slots=True)
class Trend:
    """How a metric moved over a window: its mean over the first steps and over the newest.

    Attributes:
        error: Standard error of the difference of the two means.
    """

    first: float
    newest: float
    error: float

    @property
    def is_rising(self) -> bool:
        """Whether it rose by more than chance."""
        return self.newest - self.first > RISE_ERRORS * self.error

    @property
    def is_falling(self) -> bool:
        """Whether it fell by more than chance."""
        return self.first - self.newest > RISE_ERRORS * self.error


@dataclass(frozen=True, slots=True)
class Fall:
    """A metric's best mean of ten steps in a window, which begins at step `best_at` of it, and its
    newest mean of ten steps, which is lower by more than chance.
    """

    best: float
    newest: float
    best_at: int


class StepWindow:
    """The newest steps that updated the policy, oldest first."""

    def __init__(self, steps: Sequence[TrainStepCommitted]) -> None:
        self.steps = [step for step in steps[-WINDOW_STEPS:] if not step.update_held]

    def values(self, name: str) -> list[float]:
        """Return a metric's finite values."""
        values = (step.metrics.get(name, math.nan) for step in self.steps)
        return [value for value in values if math.isfinite(value)]

    def recent(self, name: str) -> float | None:
        """Return a metric's mean over the newest 20 steps; None where fewer than 10 have it."""
        values = self.values(name)[-RECENT_STEPS:]
        return sum(values) / len(values) if len(values) >= MIN_STEPS else None

    def recent_sum(self, name: str) -> float:
        """Return a metric's sum over the newest 20 steps."""
        return math.fsum(self.values(name)[-RECENT_STEPS:])

    def trend(self, name: str) -> Trend | None:
        """Return how a metric moved; None where fewer than 10 steps have it."""
        values = np.array(self.values(name))
        if len(values) < MIN_STEPS:
            return None
        part = min(RECENT_STEPS, len(values) // 2)
        first, newest = values[:part], values[-part:]
        return Trend(float(first.mean()), float(newest.mean()), _compute_error(first, newest))

    def find_fall(self, name: str, ratio: float) -> Fall | None:
        """Return the fall of a metric from a positive best to less than this ratio of it; None
        where it did not fall so.
        """
        values = np.array(self.values(name))
        if len(values) < 2 * FALL_WINDOW:
            return None
        means = self.compute_means(name)
        at = int(means.argmax())
        best, newest = values[at : at + FALL_WINDOW], values[-FALL_WINDOW:]
        fell = float(best.mean() - newest.mean())
        if best.mean() <= 0 or newest.mean() >= ratio * best.mean():
            return None
        is_chance = fell <= FALL_ERRORS * _compute_error(best, newest)
        return None if is_chance else Fall(float(best.mean()), float(newest.mean()), at)

    def compute_means(self, name: str) -> np.ndarray:
        """Return a metric's means of ten steps, by the first of them; empty where there are fewer.

        Float64 [num_values - 9].
        """
        values = np.array(self.values(name))
        if len(values) < FALL_WINDOW:
            return np.zeros(0)
        return np.convolve(values, np.full(FALL_WINDOW, 1 / FALL_WINDOW), mode="valid")


def _compute_error(first: np.ndarray, newest: np.ndarray) -> float:
    return math.sqrt(first.var(ddof=1) / len(first) + newest.var(ddof=1) / len(newest))
