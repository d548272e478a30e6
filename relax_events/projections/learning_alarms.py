"""What the newest train steps show to be wrong with learning; docs/explanation/verdict.md has the
reason of each bound.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice

from relax_events.events.parts import Outcome, SampleOutcome
from relax_events.projections.alarm_texts import Alarm, AlarmSettings
from relax_events.projections.run_state import RunState
from relax_events.projections.step_window import MIN_STEPS, RECENT_STEPS, Fall, StepWindow

COLLAPSED_RATIO = 0.5
FALLEN_RATIO = 0.8
JUMP_RATIO = 3.0
JUMPS = {"grad_norm": 1.0, "clip_fraction": 0.1, "kl_estimate": 0.1}
"""Metrics that jump before a reward falls because of too large steps, and the least value that
counts."""
ON_POLICY_STALENESS = 0.1
MISMATCH_KL = 0.01
ENTROPY = 0.05
LENGTH_RATIO = 1.5
LENGTH_TRUNCATED_RATIO = 0.1
TRUNCATED_RATIO = 0.25
SIGNALLESS_RATIO = 0.5
FILTERED_RATIO = 0.75
EXPIRED_RATIO = 0.1
EFFECTIVE_RATIO = 0.6
SAME_REWARD_RATIO = 0.4
STUCK_STEPS = 40
ENDED_RATIOS = {
    SampleOutcome.LOST: (0.05, "RelaxSamplesLostOrLate"),
    SampleOutcome.REFUSED: (0.05, "RelaxSamplesRefused"),
    SampleOutcome.LATE: (0.1, "RelaxSamplesLostOrLate"),
}
"""Largest usual share of a train step's samples that ended so, and the runbook."""


def find_learning_alarms(
    settings: AlarmSettings, state: RunState, window: StepWindow
) -> Iterator[Alarm]:
    """Yield what is wrong with learning.

    Args:
        settings: Of the run.
        state: The folded control log.
        window: The newest of its steps.
    """
    if len(window.steps) < MIN_STEPS:
        return
    since = window.steps[-min(RECENT_STEPS, len(window.steps))].committed_at
    rewards = window.trend("reward_mean")
    is_fine = (rewards is not None and rewards.is_rising) or is_reward_level(window)
    yield from _of_rewards(window, since)
    yield from _of_mismatch(window, since)
    yield from _of_memory(settings, window, since)
    if rewards is not None and not is_fine:
        yield from _of_policy(settings, window, since)
        yield from _of_signal(settings, state, window, since)
    yield from _of_samples(settings, window, since)
    yield from _of_staleness(settings, state, window, since)
    if rewards is not None and not is_fine and len(window.values("reward_mean")) >= STUCK_STEPS:
        yield Alarm(
            "reward_flat",
            "info",
            since,
            "RelaxRewardFlat",
            {"reward": rewards.newest, "count": len(window.values("reward_mean"))},
        )


def is_reward_level(window: StepWindow) -> bool:
    """Return whether nearly all of the newest samples earn the same reward above 0, so that these
    prompts have little left to teach.
    """
    mean, deviation = window.recent("reward_mean"), window.recent("reward_std")
    return (
        mean is not None
        and deviation is not None
        and mean > 0
        and deviation < SAME_REWARD_RATIO * mean
    )


def _of_rewards(window: StepWindow, since: int) -> Iterator[Alarm]:
    fall = window.find_fall("reward_mean", FALLEN_RATIO)
    if fall is None:
        return
    values = {"best": fall.best, "newest": fall.newest}
    if jump := _find_jump(window, fall):
        name, before, after = jump
        rate = window.values("learning_rate")[-1:] or [0.0]
        yield Alarm(
            "learning_rate_high",
            "critical",
            since,
            "RelaxLearningRateHigh",
            values | {"metric": name, "before": before, "after": after, "rate": rate[0]},
        )
    elif fall.newest < COLLAPSED_RATIO * fall.best:
        yield Alarm("reward_collapsed", "critical", since, "RelaxRewardCollapsed", values)


def _find_jump(window: StepWindow, fall: Fall) -> tuple[str, float, float] | None:
    """Return the metric that grew most from the best rewards on, with its mean there and its
    largest later one; None where none jumped.
    """
    jumps = []
    for name, least in JUMPS.items():
        means = window.compute_means(name)
        if len(means) != len(window.compute_means("reward_mean")):
            continue
        before, after = float(means[fall.best_at]), float(means[fall.best_at :].max())
        if after >= max(JUMP_RATIO * before, least):
            jumps.append((after / max(before, 1e-9), name, before, after))
    return max(jumps)[1:] if jumps else None


def _of_mismatch(window: StepWindow, since: int) -> Iterator[Alarm]:
    staleness, mismatch = window.recent("staleness_mean"), window.recent("mismatch_kl")
    if staleness is None or mismatch is None or staleness > ON_POLICY_STALENESS:
        return
    if mismatch > MISMATCH_KL:
        yield Alarm(
            "engine_mismatch", "critical", since, "RelaxEngineMismatch", {"mismatch": mismatch}
        )


def _of_memory(settings: AlarmSettings, window: StepWindow, since: int) -> Iterator[Alarm]:
    num_too_large = window.recent_sum("prompt_groups_too_large")
    cells = window.steps[-1].max_cells
    if num_too_large or cells:
        budget = settings.micro_batch_tokens
        yield Alarm(
            "memory_short",
            "warning",
            since,
            "RelaxMemoryShort",
            {"count": int(num_too_large), "cells": cells or budget, "budget": budget},
        )


def _of_policy(settings: AlarmSettings, window: StepWindow, since: int) -> Iterator[Alarm]:
    entropy, lengths = window.trend("entropy"), window.trend("completion_tokens_mean")
    truncated = compute_ended_ratio(window, SampleOutcome.TRUNCATED)
    if entropy is not None and entropy.newest < ENTROPY:
        yield Alarm(
            "entropy_collapsed",
            "warning",
            since,
            "RelaxEntropyCollapsed",
            {
                "first": entropy.first,
                "newest": entropy.newest,
                "coefficient": settings.entropy_coefficient,
            },
        )
    if lengths is None or truncated is None or truncated <= LENGTH_TRUNCATED_RATIO:
        return
    if lengths.is_rising and lengths.newest > LENGTH_RATIO * lengths.first:
        yield Alarm(
            "length_growing",
            "warning",
            since,
            "RelaxLengthGrowing",
            {"first": lengths.first, "newest": lengths.newest, "ratio": truncated},
        )


def compute_ended_ratio(window: StepWindow, outcome: SampleOutcome) -> float | None:
    """Return the share of the newest steps' samples that ended so; None where it is unknown."""
    counts = {name: window.recent_sum(f"samples_ended/{name}") for name in SampleOutcome}
    total = sum(counts.values())
    return counts[outcome] / total if total else None


def _of_samples(settings: AlarmSettings, window: StepWindow, since: int) -> Iterator[Alarm]:
    truncated = compute_ended_ratio(window, SampleOutcome.TRUNCATED)
    if truncated is not None and truncated > TRUNCATED_RATIO:
        limit = settings.max_new_tokens
        values = {"ratio": truncated, "limit": limit}
        yield Alarm("truncated", "warning", since, "RelaxSamplesTruncated", values)
    for outcome, (usual, runbook) in ENDED_RATIOS.items():
        ratio = compute_ended_ratio(window, outcome)
        if ratio is not None and ratio > usual:
            yield Alarm(f"samples_{outcome}", "warning", since, runbook, {"ratio": ratio})


def compute_outcome_ratio(settings: AlarmSettings, state: RunState, outcome: Outcome) -> float:
    """Return the share with this outcome of as many of the newest prompt groups as 20 steps train,
    without spares that were not needed.
    """
    count = RECENT_STEPS * settings.prompts_per_step
    newest = Counter(islice(filter(None, reversed(state.recent_outcomes.values())), count))
    return newest[outcome] / max(newest.total(), 1)


def _of_signal(
    settings: AlarmSettings, state: RunState, window: StepWindow, since: int
) -> Iterator[Alarm]:
    filtered = compute_outcome_ratio(settings, state, Outcome.FILTERED)
    equal = window.recent("equal_reward_ratio") or 0.0
    if filtered > FILTERED_RATIO or equal > SIGNALLESS_RATIO:
        values = {
            "ratio": max(filtered, equal),
            "reward": window.recent("reward_mean"),
            "samples": settings.samples_per_prompt,
        }
        yield Alarm("no_signal", "warning", since, "RelaxNoSignal", values)


def _of_staleness(
    settings: AlarmSettings, state: RunState, window: StepWindow, since: int
) -> Iterator[Alarm]:
    expired = compute_outcome_ratio(settings, state, Outcome.EXPIRED)
    staleness = window.recent("staleness_mean") or 0.0
    effective = window.recent("effective_sample_ratio")
    bound = settings.max_staleness
    if expired > EXPIRED_RATIO:
        values = {"ratio": expired, "bound": bound}
        yield Alarm("samples_expired", "warning", since, "RelaxSamplesStale", values)
    if effective is not None and staleness >= 1 and effective < EFFECTIVE_RATIO:
        values = {"ratio": effective, "staleness": staleness, "bound": bound}
        yield Alarm("samples_stale", "warning", since, "RelaxSamplesStale", values)
