"""Whether engine and trainer have the same weights, by what they compute in the first step."""

from __future__ import annotations

from relax_events.config import RunConfig
from relax_events.errors import ConfigError
from relax_events.training.backend.protocol import StepMetrics

NUM_NAMED = 8
"""Samples in an error."""
FAR_NATS = 0.1
"""Rounding hardly ever moves the mean absolute difference so far."""


def require_agreement(first: StepMetrics, config: RunConfig) -> None:
    """Require that the log-probabilities of a run's first train step, computed by engine and
    trainer with the same weights, differ by rounding at most.

    Args:
        first: Metrics of the step.
        config: The run; without an engine there is nothing to compare.
    Raises:
        ConfigError: They differ; the text says by how much and in which samples.
    """
    bound = config.trainer.max_start_mismatch
    if not config.algorithm.has_rewards or not bound or first.mismatch_kl <= bound:
        return
    samples = ", ".join(first.worst_sample_ids[:NUM_NAMED])
    if first.mismatch_mean_abs > FAR_NATS:
        remedy = (
            "their weights or prompts are not the same: see that `relax doctor` finds every tensor "
            f"in model.path {config.model.path}, and that engine.name {config.engine.name!r} "
            "supports the model"
        )
    else:
        remedy = (
            "if model.dtype or the routing of experts explains it, set model.routing_replay = "
            "'rollout', model.dtype = 'float32', or trainer.max_start_mismatch above it"
        )
    raise ConfigError(
        f"engine and trainer compute other log-probabilities for policy version "
        f"{config.first_version}: mismatch_kl must be <= trainer.max_start_mismatch = {bound:g} "
        f"nats a token, got {first.mismatch_kl:.3g} over {first.num_loss_tokens} tokens (mean "
        f"absolute difference {first.mismatch_mean_abs:.3g}, largest "
        f"{first.mismatch_max_abs:.3g}, in the micro-batch of samples {samples}); {remedy}"
    )
