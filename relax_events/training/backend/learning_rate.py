"""Learning rates of policy and critic in each train step."""

from __future__ import annotations

import math

from relax_events.config import RunConfig, TrainerConfig
from relax_events.events.types import TrainStepCommitted


def holds_policy(
    first_policy_step: int, *, step: int, recorded: TrainStepCommitted | None = None
) -> bool:
    """Return whether only the critic learns from a step.

    Args:
        first_policy_step: Of the run; a replay counts it from where its parent began.
        step: The train step.
        recorded: The parent's step that a replay trains again. Where an older release trained it at
            a learning rate of 0, which moved the optimizer's state, the replay does so, too.
    """
    return step < first_policy_step and (recorded is None or recorded.update_held)


def compute_policy_learning_rate(config: RunConfig, *, step: int) -> float:
    """Return the policy's learning rate in a step: its schedule, once the critic has learned alone.
    Before, it is 0, for the steps of older releases that are trained again.
    """
    if step < config.first_policy_step:
        return 0.0
    waited = config.critic.warmup_steps if config.algorithm.needs_critic else 0
    return compute_scheduled_learning_rate(
        config.trainer, step=step - waited, num_steps=config.run.num_steps - waited
    )


def compute_scheduled_learning_rate(trainer: TrainerConfig, *, step: int, num_steps: int) -> float:
    """Return the learning rate of a step.

    Args:
        trainer: Peak rate, warm-up and schedule.
        step: From 0.
        num_steps: Steps of the run; later steps of an extended run keep the last
            rate.
    """
    warmup = min(1.0, (step + 1) / max(1, trainer.warmup_steps))
    if trainer.schedule == "constant":
        return trainer.learning_rate * warmup
    left = (num_steps - min(step, num_steps - 1)) / max(1, num_steps - trainer.warmup_steps)
    if trainer.schedule == "cosine":
        left = (1 - math.cos(math.pi * min(1.0, left))) / 2
    least = trainer.min_learning_rate_ratio
    return trainer.learning_rate * min(warmup, least + (1 - least) * left)
