"""What a trainer and a critic can't do together, or with their algorithm or parent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from relax_events.errors import ConfigError

if TYPE_CHECKING:
    from relax_events.config.run_config import RunConfig


def check_optimizer_steps(config: RunConfig) -> Iterator[str]:
    """Give mini-batches that a train batch can't be dealt into, and several optimizer steps where
    the algorithm can take but one.
    """
    trainer, algorithm, num_groups = config.trainer, config.algorithm, config.run.prompts_per_step
    mini_batches = {
        "trainer": trainer.num_mini_batches,
        "critic": (config.critic.num_mini_batches or 1) if algorithm.needs_critic else 1,
    }
    for section, num_mini_batches in mini_batches.items():
        if num_mini_batches > num_groups:
            yield (
                f"{section}.num_mini_batches must be at most run.prompts_per_step = {num_groups}, "
                f"got {num_mini_batches}: prompt groups are dealt whole; set "
                f"{section}.num_mini_batches or run.prompts_per_step"
            )
    if (
        trainer.has_mini_batches
        and not algorithm.is_unread
        and (reason := algorithm.spec.one_update)
    ):
        yield (
            f"trainer.num_epochs = {trainer.num_epochs} and trainer.num_mini_batches = "
            f"{trainer.num_mini_batches} are not for {algorithm.name}: {reason}; set both to 1, "
            "or take another algorithm"
        )
    if trainer.max_kl and not trainer.has_mini_batches:
        yield (
            f"trainer.max_kl = {trainer.max_kl:g} has nothing to end: a train step is one "
            "optimizer step; set trainer.num_epochs, or leave it out"
        )
    if trainer.max_kl and not algorithm.has_rewards:
        yield (
            f"trainer.max_kl = {trainer.max_kl:g} compares with the policy that drew the "
            f"samples, and {algorithm.name} has none; leave it out"
        )


def check_token_staleness(config: RunConfig) -> Iterator[str]:
    """Give a bound of the tokens' staleness that masks nothing."""
    bound, algorithm = config.algorithm.max_token_staleness, config.algorithm
    if bound is None:
        return
    if not algorithm.has_rewards:
        yield (
            f"algorithm.max_token_staleness = {bound} masks tokens by the version that generated "
            f"them, and algorithm {algorithm.name} generates none; leave it out"
        )
    if bound >= config.run.max_staleness and not config.is_replay:
        yield (
            f"algorithm.max_token_staleness = {bound} masks no token, since none is more than "
            f"run.max_staleness = {config.run.max_staleness} versions behind; set it below, or "
            "leave it out"
        )


def check_backend(config: RunConfig) -> Iterator[str]:
    """Give what backend `megatron` does not train."""
    if config.trainer.backend == "megatron":
        for problem in _find_megatron_problems(config):
            yield f"trainer.backend = 'megatron' {problem}, or set trainer.backend = 'torch'"


def _find_megatron_problems(config: RunConfig) -> Iterator[str]:
    model, trainer = config.model, config.trainer
    if "language" in model.frozen:
        yield "trains the decoder, and model.frozen names 'language'; leave that out"
    if trainer.sharding != "none":
        yield (
            "divides the optimizer's state over data-parallel ranks in any case, and "
            f"trainer.sharding is {trainer.sharding!r}; leave it out"
        )
    if trainer.activation_checkpointing == "selective":
        yield (
            "computes whole layers again or none, and trainer.activation_checkpointing is "
            "'selective'; set it to 'whole' or 'none'"
        )


def check_critic_ranks(config: RunConfig) -> Iterator[str]:
    """Give ranks over which the critic can't be divided; the text names the smallest changes that
    fit.
    """
    trainer, ranks = config.trainer, config.critic_ranks
    if config.algorithm.is_unread or not config.algorithm.needs_critic:
        return
    if ranks > 1 and trainer.backend == "torch" and trainer.sharding == "none":
        yield (
            f"critic.ranks = {ranks}, and backend 'torch' keeps the critic whole in one process "
            "while trainer.sharding is 'none'; set trainer.sharding = 'full', or leave "
            "critic.ranks out"
        )
    try:
        trainer.topology(ranks)
    except ConfigError as error:
        yield str(error).replace("trainer.ranks", "critic.ranks")


def check_parent(config: RunConfig) -> Iterator[str]:
    """Give a run that is its own parent, and a fork that ends before it begins."""
    parent, run = config.parent, config.run
    if parent.run == run.id:
        yield (
            f"parent.run must be another run than run.id = {run.id!r}; give this one an "
            "id of its own"
        )
    if parent.run and not config.is_replay and run.num_steps <= parent.from_version:
        yield (
            f"a fork counts on from version {parent.from_version}, so run.num_steps must "
            f"be above it, got {run.num_steps}"
        )
