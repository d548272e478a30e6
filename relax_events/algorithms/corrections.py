"""What sets a policy loss right for samples that other weights, or another engine, drew: weights
and masks that carry no gradient.

All of them leave the step's normaliser as it is: a masked token still counts in the mean.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from relax_events.algorithms.kl import kl_estimate
from relax_events.algorithms.losses import MAX_LOG_RATIO, sample_sums

Correction = Literal["none", "decoupled", "tis", "icepop", "mask"]
Level = Literal["token", "sequence", "sequence_mean"]
RejectionEstimator = Literal["none", "k1", "k2", "k3"]
RejectionReduction = Literal["mean", "sum", "max"]


@dataclass(frozen=True, slots=True)
class CorrectionWeights:
    """By what each token's policy loss is multiplied, and where the ratio lay outside the range."""

    values: Float[Tensor, " tokens"]
    outside: Bool[Tensor, " tokens"]


def correction_weights(
    log_ratio: Float[Tensor, " tokens"],
    *,
    num_loss_tokens: Int[Tensor, " samples"],
    kind: Correction,
    level: Level,
    low: float | None,
    high: float | None,
) -> CorrectionWeights:
    """Weigh tokens by w, the ratio of the old (proximal) policy to the one that drew them.

    decoupled: w. tis: w kept within [low, high]. icepop: w inside, 0 outside. mask: 1 inside, 0
        outside.

    Args:
        log_ratio: Old policy's log-probabilities less the drawing policy's, in nats.
        num_loss_tokens: Of each sample in packed order.
        kind: What is done with w.
        level: Whether w is a token's, the product over the sample's tokens, or their geometric
            mean.
        low: Lower end of the range.
        high: Upper end of the range.
    Source: decoupled: Batch size invariance for policy optimization (arXiv 2110.00641) and AReaL
    (arXiv 2505.24298), section 5.2.
        tis: Truncated importance sampling (Ionides 2008), as in Your efficient RL framework
            secretly brings you off-policy RL training
        (Yao et al. 2025). icepop: IcePop in Every step evolves (arXiv 2510.18855).
    """
    if level != "token":
        log_ratio = sample_sums(
            log_ratio, num_loss_tokens=num_loss_tokens, mean=level == "sequence_mean"
        )
    ratio = log_ratio.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if kind == "none":
        return CorrectionWeights(torch.ones_like(ratio), torch.zeros_like(ratio, dtype=torch.bool))
    if low is None or high is None:
        return CorrectionWeights(ratio, torch.zeros_like(ratio, dtype=torch.bool))
    outside = (ratio < low) | (ratio > high)
    if kind == "tis":
        return CorrectionWeights(ratio.clamp(low, high), outside)
    inside = (~outside).to(ratio.dtype)
    return CorrectionWeights(ratio * inside if kind == "icepop" else inside, outside)


@dataclass(frozen=True, slots=True)
class Rejection:
    """Which samples are left out, by the reason. One that both hold for counts as vetoed alone."""

    by_veto: Bool[Tensor, " samples"]
    by_divergence: Bool[Tensor, " samples"]

    def tokens(self, num_loss_tokens: Int[Tensor, " samples"]) -> Bool[Tensor, " tokens"]:
        """Mark the loss tokens of the samples."""
        return (self.by_veto | self.by_divergence).repeat_interleave(num_loss_tokens)


def reject_samples(
    log_ratio: Float[Tensor, " tokens"],
    *,
    num_loss_tokens: Int[Tensor, " samples"],
    kind: RejectionEstimator,
    over: RejectionReduction,
    low: float | None,
    high: float | None,
    veto_low: float = 0.0,
    veto_high: float = 0.0,
) -> Rejection:
    """Say which samples the old policy and the one that drew them are too far apart on to be
    trained.

    With x = log w at each token: k1 = -x, k2 = x^2 / 2, k3 = e^x - 1 - x, estimates of KL(drawing
    policy || old). A sample goes where the estimate over its tokens is above `high`; with k1, where
    exp(sum of x), or exp(mean of x), is outside [low, high]. It is vetoed where any token's w is
    outside [veto_low, veto_high]. What becomes of the tokens of the other samples is left to
    `correction_weights`.

    Args:
        log_ratio: Old policy's log-probabilities less the drawing policy's, in nats.
        num_loss_tokens: Of each sample in packed order; one without any is never rejected.
        kind: The estimate.
        over: How a sample's tokens are put together; k1 has no `max`.
        low: Of k1 alone; None for 1 / high.
        high: In nats, with k1 a ratio.
        veto_low: Smallest w that a token may have; 0 for none.
        veto_high: Largest w that a token may have; 0 for none.
    Source: Rejection sampling in verl's rollout correction (its options seq_mean, seq_sum, seq_max
    with k1, k2, k3, and its token veto);
        geometric mean (`mean` of k1) and veto: When speed kills stability (Liu, Li et al. 2025).
            Estimates: see `kl_estimate`.
    """
    log_ratio = log_ratio.detach()
    owners = torch.arange(len(num_loss_tokens), device=log_ratio.device).repeat_interleave(
        num_loss_tokens
    )
    none = torch.zeros(len(num_loss_tokens), dtype=torch.bool, device=log_ratio.device)
    outside = torch.zeros_like(log_ratio, dtype=torch.bool)
    if veto_low:
        outside = outside | (log_ratio < math.log(veto_low))
    if veto_high:
        outside = outside | (log_ratio > math.log(veto_high))
    by_veto = none.to(log_ratio.dtype).index_add(0, owners, outside.to(log_ratio.dtype)) > 0
    if kind == "none" or high is None:
        return Rejection(by_veto=by_veto, by_divergence=none)
    estimates = kl_estimate(-log_ratio, base_logprobs=torch.zeros_like(log_ratio), estimator=kind)
    zeros = none.to(log_ratio.dtype)
    if over == "max":
        values = zeros.scatter_reduce(0, owners, estimates, "amax")
    else:
        values = zeros.index_add(0, owners, estimates) / (
            num_loss_tokens.clamp(min=1).to(zeros.dtype) if over == "mean" else 1
        )
    if kind == "k1":
        lower = -math.log(high) if low is None else math.log(low)
        rejected = (-values < lower) | (-values > math.log(high))
    else:
        rejected = values > high
    return Rejection(by_veto=by_veto, by_divergence=rejected & ~by_veto & (num_loss_tokens > 0))


def mask_off_policy_sequences(
    logprobs: Float[Tensor, " tokens"],
    *,
    rollout_logprobs: Float[Tensor, " tokens"],
    advantages: Float[Tensor, " tokens"],
    num_loss_tokens: Int[Tensor, " samples"],
    threshold: float,
) -> Bool[Tensor, " tokens"]:
    """Mark the tokens with negative advantage in samples that the policy has left behind (OPSM).

    Args:
        logprobs: Of the weights being trained, in nats.
        rollout_logprobs: Of the policy that drew the tokens, in nats.
        advantages: Unitless.
        num_loss_tokens: Of each sample in packed order.
        threshold: Largest mean of rollout_logprobs - logprobs over a sample that is still trained,
            in nats a token.
    Source: DeepSeek-V3.2 (arXiv 2512.02556), section 3.1, off-policy sequence masking: against the
    policy that drew the tokens.
    """
    distance = sample_sums(
        (rollout_logprobs - logprobs).detach(), num_loss_tokens=num_loss_tokens, mean=True
    )
    return (distance > threshold) & (advantages < 0)
