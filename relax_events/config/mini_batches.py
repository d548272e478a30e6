"""What several optimizer steps in a train step ask of the rest of a run file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from relax_events.config.sections import RunConfig


def check_mini_batches(config: RunConfig) -> None:
    """Refuse mini-batches that a train batch can't be dealt into, and several optimizer steps where the algorithm can take but one.

    Raises:
        ValueError: The text names the setting, its value and the remedy.
    """
    if (problem := next(_problems(config), None)) is not None:
        raise ValueError(problem)


def _problems(config: RunConfig) -> Iterator[str]:
    trainer, algorithm, num_groups = config.trainer, config.algorithm, config.run.groups_per_step
    wanted = {"trainer": trainer.num_mini_batches, "critic": (config.critic.num_mini_batches or 1) if algorithm.needs_critic else 1}
    for section, num_mini_batches in wanted.items():
        if num_mini_batches > num_groups:
            rule = f"{section}.num_mini_batches must be at most run.groups_per_step = {num_groups}, got {num_mini_batches}"
            yield f"{rule}: prompt groups are dealt whole; set {section}.num_mini_batches or run.groups_per_step"
    if trainer.has_mini_batches and not algorithm.is_unread and (reason := algorithm.spec.one_update):
        asked = f"trainer.num_epochs = {trainer.num_epochs} and trainer.num_mini_batches = {trainer.num_mini_batches}"
        yield f"{asked} are not for {algorithm.name}: {reason}; set both to 1, or take another algorithm"
    if trainer.max_kl and not trainer.has_mini_batches:
        yield f"trainer.max_kl = {trainer.max_kl:g} has nothing to end: a train step is one optimizer step; set trainer.num_epochs, or leave it out"
    if trainer.max_kl and not algorithm.has_rewards:
        yield f"trainer.max_kl = {trainer.max_kl:g} compares with the policy that drew the samples, and {algorithm.name} has none; leave it out"
