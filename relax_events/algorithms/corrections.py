"""What sets a policy loss right for samples that other weights, or another engine, drew: weights and masks that carry no gradient.

All of them leave the step's normaliser as it is: a masked token still counts in the mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from relax_events.algorithms.losses import MAX_LOG_RATIO, sample_sums

Correction = Literal["none", "decoupled", "tis", "icepop", "mask"]
Level = Literal["token", "sequence", "sequence_mean"]


@dataclass(frozen=True, slots=True)
class Weights:
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
) -> Weights:
    """Weigh tokens by w, the ratio of the old (proximal) policy to the one that drew them.

    decoupled: w. tis: w kept within [low, high]. icepop: w inside, 0 outside. mask: 1 inside, 0 outside.

    Args:
        log_ratio: Old policy's log-probabilities less the drawing policy's, in nats.
        num_loss_tokens: Of each sample in packed order.
        kind: What is done with w.
        level: Whether w is a token's, the product over the sample's tokens, or their geometric mean.
        low: Lower end of the range.
        high: Upper end of the range.
    Source: decoupled: Batch size invariance for policy optimization (arXiv 2110.00641) and AReaL (arXiv 2505.24298), section 5.2.
        tis: Truncated importance sampling (Ionides 2008), as in Your efficient RL framework secretly brings you off-policy RL training
        (Yao et al. 2025). icepop: IcePop in Every step evolves (arXiv 2510.18855).
    """
    if level != "token":
        log_ratio = sample_sums(log_ratio, num_loss_tokens=num_loss_tokens, mean=level == "sequence_mean")
    ratio = log_ratio.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if kind == "none":
        return Weights(torch.ones_like(ratio), torch.zeros_like(ratio, dtype=torch.bool))
    if low is None or high is None:
        return Weights(ratio, torch.zeros_like(ratio, dtype=torch.bool))
    outside = (ratio < low) | (ratio > high)
    if kind == "tis":
        return Weights(ratio.clamp(low, high), outside)
    inside = (~outside).to(ratio.dtype)
    return Weights(ratio * inside if kind == "icepop" else inside, outside)


def off_policy_sequences(
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
        threshold: Largest mean of rollout_logprobs - logprobs over a sample that is still trained, in nats a token.
    Source: DeepSeek-V3.2 (arXiv 2512.02556), section 3.1, off-policy sequence masking: against the policy that drew the tokens.
    """
    distance = sample_sums((rollout_logprobs - logprobs).detach(), num_loss_tokens=num_loss_tokens, mean=True)
    return (distance > threshold) & (advantages < 0)
