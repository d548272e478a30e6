"""Computes a run's objective token by token and aggregates it over a step: policy loss,
corrections, KL, entropy, distillation.

A step's loss is

    sum over micro-batches of (token_weights * losses).sum()  /  sum over micro-batches of num_units

so the sum over micro-batches, packed rows and ranks is the same however the step is split.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from relax_events.algorithms.corrections import (
    CorrectionWeights,
    Rejection,
    correction_weights,
    mask_off_policy_sequences,
    reject_samples,
)
from relax_events.algorithms.distillation import TokenSet, divergence, sampled_divergence
from relax_events.algorithms.kl import kl_estimate
from relax_events.algorithms.losses import MAX_LOG_RATIO, LossTokens, PolicyLossOutput
from relax_events.config import AlgorithmConfig
from relax_events.config.algorithm_spec import resolve
from relax_events.errors import ConfigError

Aggregation = Literal["token_mean", "sample_mean", "constant_length"]


def token_weights(
    num_loss_tokens: Int[Tensor, " samples"],
    *,
    aggregation: Aggregation,
    length_normaliser: int = 1,
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, " tokens"]:
    """Return the raw weight of each loss token: 1 for `token_mean`, 1 / (loss tokens of its sample)
    for `sample_mean`, 1 / length_normaliser.

    Divide the weighted sum over a whole step by the sum of `num_units` over the step, never by a
    micro-batch's own.

    Args:
        num_loss_tokens: Of each sample in packed order; a sample may have none.
        aggregation: How the step's mean is defined.
        length_normaliser: Of `constant_length`, in tokens.
        dtype: Of the weights.
    Returns:
        Unnormalised weights, in packed order.
    """
    if aggregation == "sample_mean":
        return (1 / num_loss_tokens.clamp(min=1).to(dtype)).repeat_interleave(num_loss_tokens)
    weight = 1.0 if aggregation == "token_mean" else 1 / length_normaliser
    return torch.full(
        (int(num_loss_tokens.sum()),), weight, dtype=dtype, device=num_loss_tokens.device
    )


def num_units(num_loss_tokens: Int[Tensor, " samples"], *, aggregation: Aggregation) -> int:
    """Return the normaliser of the step's mean: loss tokens for `token_mean`, samples that have any
    for the others.

    Args:
        num_loss_tokens: Of each sample.
        aggregation: How the step's mean is defined.
    Returns:
        This part's share of the step's normaliser.
    """
    return int(
        num_loss_tokens.sum() if aggregation == "token_mean" else (num_loss_tokens > 0).sum()
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveInputs:
    """The loss tokens of a micro-batch, concatenated. Log-probabilities and entropies are in
    nats.

    Attributes:
        logprobs: Of the weights being trained; carries the gradient.
        entropies: Of the distributions that the tokens were sampled from; carries the gradient
            where there is an entropy bonus.
        rollout_logprobs: As the engine returned them.
        old_logprobs: Of the old policy; None for the weights being trained.
        ref_logprobs: Of the reference model, where the loss uses them.
        advantages: Unitless.
        num_loss_tokens: Of each sample in packed order.
        second_moment_cutoff: Largest squared log-ratio to the engine's policy that is trained, over
            the whole step.
        teacher_logprobs: Of the teacher, where the algorithm has one.
        token_set: Where the loss compares policy and teacher over several token ids.
        staleness: Versions that each token is behind the trainer, where that is bounded.
        imbalance: Load-balancing loss of each token's path, where experts are balanced.
    """

    logprobs: Float[Tensor, " tokens"]
    entropies: Float[Tensor, " tokens"]
    rollout_logprobs: Float[Tensor, " tokens"]
    old_logprobs: Float[Tensor, " tokens"] | None
    ref_logprobs: Float[Tensor, " tokens"] | None
    advantages: Float[Tensor, " tokens"]
    num_loss_tokens: Int[Tensor, " samples"]
    second_moment_cutoff: float | None = None
    teacher_logprobs: Float[Tensor, " tokens"] | None = None
    token_set: TokenSet | None = None
    staleness: Float[Tensor, " tokens"] | None = None
    imbalance: Float[Tensor, " tokens"] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLosses:
    """A micro-batch's losses: (token_weights * losses).sum() is its share of the step's, before the
    step's normaliser.

    `policy_losses` are after correction, `kl`, `distillation` and `imbalance` are 0 where the loss
    has none, `masked` are the tokens without a policy gradient.
    """

    token_weights: Float[Tensor, " tokens"]
    losses: Float[Tensor, " tokens"]
    policy_losses: Float[Tensor, " tokens"]
    kl: Float[Tensor, " tokens"]
    distillation: Float[Tensor, " tokens"]
    imbalance: Float[Tensor, " tokens"]
    policy_loss: PolicyLossOutput
    correction: CorrectionWeights
    rejection: Rejection
    masked: Bool[Tensor, " tokens"]


class Objective:
    """The objective that an `AlgorithmConfig` specifies."""

    def __init__(self, algorithm: AlgorithmConfig, *, max_new_tokens: int) -> None:
        """Load the algorithm's policy loss.

        Args:
            algorithm: The settings.
            max_new_tokens: Default divisor of `constant_length`.
        Raises:
            ConfigError: There is no such algorithm.
        """
        self.algorithm = algorithm
        self._length_normaliser = algorithm.length_normaliser or max_new_tokens
        self._policy_loss = resolve(algorithm.spec.policy_loss)
        self._settings = algorithm.keywords(algorithm.spec.loss_settings)

    def num_units(self, num_loss_tokens: Int[Tensor, " samples"]) -> int:
        """Count this part's share of the step's normaliser."""
        return num_units(num_loss_tokens, aggregation=self.algorithm.aggregation)

    def path_weights(
        self,
        num_loss_tokens: Int[Tensor, " samples"],
        num_path_loss_tokens: Int[Tensor, " paths"],
    ) -> Float[Tensor, " paths"]:
        """Return the weight of each path of the samples in the loss, before the step's
        normaliser.
        """
        weights = token_weights(
            num_loss_tokens,
            aggregation=self.algorithm.aggregation,
            length_normaliser=self._length_normaliser,
            dtype=torch.float64,
        )
        owners = torch.arange(len(num_path_loss_tokens)).repeat_interleave(num_path_loss_tokens)
        return weights.new_zeros(len(num_path_loss_tokens)).index_add(0, owners, weights)

    def __call__(self, inputs: ObjectiveInputs) -> TokenLosses:
        """Compute the losses of a micro-batch.

        Raises:
            ConfigError: A custom algorithm did not return a loss for each token.
        """
        algorithm = self.algorithm
        old = inputs.logprobs.detach() if inputs.old_logprobs is None else inputs.old_logprobs
        policy_loss_output = self._policy_loss_output(inputs, old)
        correction = correction_weights(
            old - inputs.rollout_logprobs,
            num_loss_tokens=inputs.num_loss_tokens,
            kind=algorithm.correction,
            level=algorithm.correction_level,
            low=algorithm.correction_low,
            high=algorithm.correction_high,
        )
        rejection = reject_samples(
            old,
            rollout_logprobs=inputs.rollout_logprobs,
            num_loss_tokens=inputs.num_loss_tokens,
            kind=algorithm.rejection,
            over=algorithm.rejection_over,
            low=algorithm.rejection_low,
            high=algorithm.rejection_high,
            veto_low=algorithm.veto_low,
            veto_high=algorithm.veto_high,
        )
        dropped = self._dropped(inputs) | rejection.tokens
        factors = correction.values.masked_fill(dropped, 0.0)
        policy_losses = factors * policy_loss_output.losses
        losses, kl = self._with_kl(policy_losses, inputs)
        distillation = self._distillation(inputs)
        losses = losses + algorithm.distill_coefficient * distillation
        if algorithm.entropy_coefficient:
            losses = losses - algorithm.entropy_coefficient * inputs.entropies
        imbalance = torch.zeros_like(inputs.logprobs)
        if algorithm.load_balancing_coefficient and inputs.imbalance is not None:
            imbalance = inputs.imbalance
            losses = losses + algorithm.load_balancing_coefficient * imbalance
        return TokenLosses(
            token_weights=token_weights(
                inputs.num_loss_tokens,
                aggregation=algorithm.aggregation,
                length_normaliser=self._length_normaliser,
                dtype=losses.dtype,
            ),
            losses=losses,
            policy_losses=policy_losses,
            kl=kl,
            distillation=distillation,
            imbalance=imbalance,
            policy_loss=policy_loss_output,
            correction=correction,
            rejection=rejection,
            masked=factors == 0,
        )

    def _policy_loss_output(
        self, inputs: ObjectiveInputs, old: Float[Tensor, " tokens"]
    ) -> PolicyLossOutput:
        tokens = LossTokens(
            logprobs=inputs.logprobs,
            old_logprobs=old,
            advantages=inputs.advantages,
            num_loss_tokens=inputs.num_loss_tokens,
            ref_logprobs=inputs.ref_logprobs,
        )
        returned = self._policy_loss(tokens, **self._settings)
        losses = returned.losses if isinstance(returned, PolicyLossOutput) else returned
        if not isinstance(losses, Tensor) or losses.shape != inputs.logprobs.shape:
            got = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
            raise ConfigError(
                f"algorithm {self.algorithm.name}: its policy loss must return one loss for "
                f"each of {len(old)} tokens, got {got}"
            )
        if isinstance(returned, PolicyLossOutput):
            return returned
        return PolicyLossOutput.unclipped(
            losses, ratio=tokens.log_ratio.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        )

    def _dropped(self, inputs: ObjectiveInputs) -> Bool[Tensor, " tokens"]:
        """Mark the tokens that the off-policy masks exclude."""
        dropped = torch.zeros_like(inputs.logprobs, dtype=torch.bool)
        if self.algorithm.opsm_threshold:
            dropped = mask_off_policy_sequences(
                inputs.logprobs,
                rollout_logprobs=inputs.rollout_logprobs,
                advantages=inputs.advantages,
                num_loss_tokens=inputs.num_loss_tokens,
                threshold=self.algorithm.opsm_threshold,
            )
        if inputs.second_moment_cutoff is not None:
            squares = (inputs.logprobs.detach() - inputs.rollout_logprobs).double().square()
            dropped = dropped | (squares > inputs.second_moment_cutoff)
        if inputs.staleness is not None and self.algorithm.max_token_staleness is not None:
            dropped = dropped | (inputs.staleness > self.algorithm.max_token_staleness)
        return dropped

    def _with_kl(
        self, losses: Float[Tensor, " tokens"], inputs: ObjectiveInputs
    ) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " tokens"]]:
        algorithm = self.algorithm
        is_of_rollout = algorithm.kl_base == "rollout"
        base_logprobs = inputs.rollout_logprobs if is_of_rollout else inputs.ref_logprobs
        if not algorithm.has_loss_kl or base_logprobs is None:
            return losses, torch.zeros_like(inputs.logprobs)
        kl = kl_estimate(
            inputs.logprobs,
            base_logprobs=base_logprobs,
            estimator=algorithm.kl_estimator,
            behaviour_logprobs=inputs.rollout_logprobs if algorithm.kl_unbiased else None,
            bound=algorithm.kl_limit,
        )
        return losses + algorithm.kl_coefficient * kl, kl

    def _distillation(self, inputs: ObjectiveInputs) -> Float[Tensor, " tokens"]:
        algorithm = self.algorithm
        if not algorithm.has_distill_loss:
            return torch.zeros_like(inputs.logprobs)
        kind, mixture = algorithm.distill_divergence, algorithm.distill_mixture
        if inputs.token_set is not None:
            return divergence(
                inputs.token_set, kind=kind, mixture=mixture, tail=algorithm.distill_tail
            )
        if inputs.teacher_logprobs is None or algorithm.distill_tokens != "sampled":
            raise ConfigError(
                f"algorithm {self.algorithm.name}: distill_tokens = "
                f"{algorithm.distill_tokens!r} needs the teacher's log-probabilities"
            )
        return sampled_divergence(
            inputs.logprobs,
            teacher_logprobs=inputs.teacher_logprobs,
            behaviour_logprobs=inputs.rollout_logprobs,
            kind=kind,
            mixture=mixture,
        )
