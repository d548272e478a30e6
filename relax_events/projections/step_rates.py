"""How fast a run trains, and its curves by step: the only place that computes tokens, samples and
seconds of its steps.

The seconds of a step are those that the trainer spent on it, waiting included: the sum of its
phases. Time in which no trainer ran, between sessions or after a crash, belongs to no step, and no
clocks of different machines are compared.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from relax_events.events.types import TrainStepCommitted
from relax_events.projections.run_state import count_samples

RATE_STEPS = 20
RATES = ("step_seconds", "tokens_per_second", "samples_per_second")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRates:
    """Means over some steps; None where no step has spent time, or none names its tokens.

    Attributes:
        phase_ratios: Each phase's share of the trainer's time.
    """

    step_seconds: float | None
    tokens_per_second: float | None
    samples_per_second: float | None
    phase_ratios: Mapping[str, float]


def compute_rates(steps: Sequence[TrainStepCommitted]) -> StepRates:
    """Compute the rates over the newest 20 of these steps: what a run's rates are, wherever they
    are shown. For those of a single step, give it alone.
    """
    newest = steps[-RATE_STEPS:]
    phases: dict[str, float] = {}
    for step in newest:
        for phase, seconds in step.phase_seconds.items():
            phases[phase] = phases.get(phase, 0.0) + seconds
    total = math.fsum(phases.values())
    if total <= 0:
        return StepRates(
            step_seconds=None, tokens_per_second=None, samples_per_second=None, phase_ratios={}
        )
    tokens = [step.metrics["num_tokens"] for step in newest if "num_tokens" in step.metrics]
    return StepRates(
        step_seconds=total / len(newest),
        tokens_per_second=math.fsum(tokens) / total if tokens else None,
        samples_per_second=sum(map(count_samples, newest)) / total,
        phase_ratios={phase: seconds / total for phase, seconds in phases.items()},
    )


class StepCurves:
    """A column of floats for each metric of the train steps; NaN where a step lacks it."""

    def __init__(self, typecode: Literal["f", "d"] = "f") -> None:
        """Begin without a step.

        Args:
            typecode: How exact values are kept: in 4 bytes, or as they are on the log in 8.
        """
        self._typecode = typecode
        self.steps, self.committed_at = array("q"), array("q")
        self.columns: dict[str, array[float]] = {}
        self.phases: dict[str, array[float]] = {}
        self.staleness_counts: list[int] = []

    def apply(self, step: TrainStepCommitted) -> None:
        """Append a step."""
        self.steps.append(step.train_step)
        self.committed_at.append(step.committed_at)
        rates = compute_rates([step])
        values = {name: rate for name in RATES if (rate := getattr(rates, name)) is not None}
        self._append(self.columns, {**step.metrics, **values})
        self._append(self.phases, step.phase_seconds)
        counts = step.staleness_counts
        self.staleness_counts += [0] * (len(counts) - len(self.staleness_counts))
        for age, count in enumerate(counts):
            self.staleness_counts[age] += count

    def _append(self, columns: dict[str, array[float]], values: dict[str, float]) -> None:
        length = len(self.steps)
        for name, value in values.items():
            if name not in columns:
                columns[name] = array(self._typecode, [math.nan]) * (length - 1)
            columns[name].append(value)
        for column in columns.values():
            if len(column) < length:
                column.append(math.nan)

    def recent(self, name: str, count: int) -> list[float]:
        """Return a metric's newest finite values, oldest first."""
        return [value for value in self.columns.get(name, ())[-count:] if math.isfinite(value)]
