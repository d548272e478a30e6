"""How fast a run trains: the only place that computes tokens, samples and seconds of its steps.

The seconds of a step are those that the trainer spent on it, waiting included: the sum of its
phases. Time in which no trainer ran, between sessions or after a crash, belongs to no step, and no
clocks of different machines are compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from relax_events.events.types import TrainStepCommitted
from relax_events.projections.run_state import count_samples

RATE_STEPS = 20


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
