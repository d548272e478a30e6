"""Compares a replay with its parent, step by step and bit for bit: metrics and weights."""

from __future__ import annotations

from dataclasses import dataclass

from relax_events.events.types import TrainStepCommitted
from relax_events.kafka.connection import Connection
from relax_events.runtime.parent_run import ParentRun


@dataclass(frozen=True, slots=True)
class Verification:
    """Number of compared steps, and the first difference as text; empty when there is none."""

    num_steps: int
    difference: str


def verify_replay(connection: Connection, source_id: str, replay_id: str) -> Verification:
    """Compare every step of a replay with the same step of its parent."""
    recorded = {step.train_step: step for step in ParentRun.read(connection, source_id).steps()}
    num_steps = 0
    for step in ParentRun.read(connection, replay_id).steps():
        if difference := first_difference(recorded[step.train_step], step):
            return Verification(num_steps, f"train step {step.train_step}: {difference}")
        num_steps += 1
    return Verification(num_steps, "" if num_steps else "no train step to compare")


def first_difference(recorded: TrainStepCommitted, replayed: TrainStepCommitted) -> str:
    """Return the difference between two commits of a step; times don't count, nor do metrics that a
    newer release added.
    """
    if recorded.sample_ids != replayed.sample_ids:
        return "other samples, or in another order"
    if recorded.update_skipped != replayed.update_skipped:
        return f"its update was {_describe_update(recorded)}, is {_describe_update(replayed)}"
    for name in sorted(recorded.metrics):
        before, after = recorded.metrics.get(name), replayed.metrics.get(name)
        if before != after:
            return f"{name} was {before!r}, is {after!r}"
    if recorded.weights_digest != replayed.weights_digest:
        return (
            f"weights digest was {recorded.weights_digest.hex()}, is "
            f"{replayed.weights_digest.hex()}"
        )
    return ""


def _describe_update(step: TrainStepCommitted) -> str:
    return "skipped" if step.update_skipped else "made"
