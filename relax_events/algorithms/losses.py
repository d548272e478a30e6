"""The policy-gradient objective on packed tokens, in a form that does not depend on how a step was cut up.

Every function works on the loss tokens of a micro-batch, laid end to end without padding. A step's loss is

    sum over micro-batches of (token_weights * losses).sum()  /  sum over micro-batches of num_units

so micro-batches, packs and ranks add up to the same number in whatever way the samples lay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

Aggregation = Literal["token_mean", "sample_mean"]
PolicyLoss = Literal["grpo", "gspo"]
KlEstimator = Literal["k1", "k2", "k3"]
MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped here before exp: e^20 is far outside any clip range, and inf * 0 in the backward pass would give NaN."""


@dataclass(frozen=True, slots=True)
class Surrogate:
    """Per-token policy loss and what the clipping did. With a ratio of sequences all tokens of a sample have the same."""

    losses: Float[Tensor, " tokens"]
    ratio: Float[Tensor, " tokens"]
    clipped_low: Bool[Tensor, " tokens"]
    clipped_high: Bool[Tensor, " tokens"]


def clipped_surrogate(
    logprobs: Float[Tensor, " tokens"],
    *,
    old_logprobs: Float[Tensor, " tokens"],
    advantages: Float[Tensor, " tokens"],
    clip_low: float,
    clip_high: float,
) -> Surrogate:
    """Compute max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A) for each token, with r = exp(logprobs - old_logprobs).

    A token counts as clipped only where the clipped branch is the one taken, that is where its gradient is zero.

    Args:
        logprobs: Of the weights being trained, in nats; carries the gradient.
        old_logprobs: Of the policy that the ratio is against, in nats.
        advantages: Unitless.
        clip_low: Lower clip range, 0.2 means a ratio of 0.8.
        clip_high: Upper clip range, 0.2 means a ratio of 1.2.
    Returns:
        Losses, and the detached ratio and clip marks.
    Source: PPO (arXiv 1707.06347), equation 7; two ranges: DAPO (arXiv 2503.14476), section 3.1.
    """
    return _clipped(logprobs - old_logprobs, advantages=advantages, clip_low=clip_low, clip_high=clip_high)


def clipped_sequence_surrogate(
    logprobs: Float[Tensor, " tokens"],
    *,
    old_logprobs: Float[Tensor, " tokens"],
    advantages: Float[Tensor, " tokens"],
    num_loss_tokens: Int[Tensor, " samples"],
    clip_low: float,
    clip_high: float,
) -> Surrogate:
    """Compute the same with one ratio for each sample: s = exp(mean over its loss tokens of logprobs - old_logprobs) (GSPO).

    Every loss token of a sample carries the sample's loss, so that with `sample_mean` each sample counts once, as in the paper. The
    whole sample is clipped or none of it. As s moves far less than the ratio of a token, its clip ranges are around 3e-4 and 4e-4.

    Args:
        logprobs: Of the weights being trained, in nats; carries the gradient.
        old_logprobs: Of the policy that the ratio is against, in nats.
        advantages: Unitless, the same at all tokens of a sample.
        num_loss_tokens: Of each sample in packed order; a sample may have none.
        clip_low: Lower clip range, 3e-4 means a ratio of 0.9997.
        clip_high: Upper clip range, 4e-4 means a ratio of 1.0004.
    Returns:
        As `clipped_surrogate`.
    Source: GSPO (arXiv 2507.18071), equations 5 and 7; clip ranges: section 5.1.
    """
    log_ratio = logprobs - old_logprobs
    owners = torch.arange(len(num_loss_tokens), device=log_ratio.device).repeat_interleave(num_loss_tokens)
    sums = log_ratio.new_zeros(len(num_loss_tokens)).index_add(0, owners, log_ratio)
    means = sums / num_loss_tokens.clamp(min=1).to(log_ratio.dtype)
    return _clipped(means[owners], advantages=advantages, clip_low=clip_low, clip_high=clip_high)


def _clipped(log_ratio: Float[Tensor, " tokens"], *, advantages: Float[Tensor, " tokens"], clip_low: float, clip_high: float) -> Surrogate:
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    unclipped = -ratio * advantages
    losses = torch.maximum(unclipped, -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    ratio = ratio.detach()
    return Surrogate(
        losses=losses,
        ratio=ratio,
        clipped_low=(ratio < 1 - clip_low) & (advantages < 0),
        clipped_high=(ratio > 1 + clip_high) & (advantages > 0),
    )


def policy_surrogate(
    logprobs: Float[Tensor, " tokens"],
    *,
    name: PolicyLoss,
    old_logprobs: Float[Tensor, " tokens"],
    advantages: Float[Tensor, " tokens"],
    num_loss_tokens: Int[Tensor, " samples"],
    clip_low: float,
    clip_high: float,
) -> Surrogate:
    """Compute the policy loss of an algorithm by name; see `clipped_surrogate` and `clipped_sequence_surrogate` for the arguments."""
    if name == "gspo":
        return clipped_sequence_surrogate(
            logprobs,
            old_logprobs=old_logprobs,
            advantages=advantages,
            num_loss_tokens=num_loss_tokens,
            clip_low=clip_low,
            clip_high=clip_high,
        )
    return clipped_surrogate(logprobs, old_logprobs=old_logprobs, advantages=advantages, clip_low=clip_low, clip_high=clip_high)


def kl_estimate(logprobs: Float[Tensor, " tokens"], *, base_logprobs: Float[Tensor, " tokens"], estimator: KlEstimator) -> Float[Tensor, " tokens"]:
    """Estimate KL(policy || base) from one drawn token: with d = logprobs - base_logprobs, k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d.

    k1 is unbiased and may be negative; k2 is biased with low variance; k3 is unbiased, never negative.

    Args:
        logprobs: Of the policy that drew the tokens, in nats.
        base_logprobs: Of the distribution compared with, in nats.
        estimator: Which of the three.
    Returns:
        The estimate at each token, in nats.
    Source: J. Schulman, Approximating KL divergence (joschu.net/blog/kl-approx.html).
    """
    difference = logprobs - base_logprobs
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    return (-difference).clamp(max=MAX_LOG_RATIO).exp() - 1 + difference


def token_weights(
    num_loss_tokens: Int[Tensor, " samples"], *, aggregation: Aggregation, dtype: torch.dtype = torch.float32
) -> Float[Tensor, " tokens"]:
    """Give the raw weight of each loss token: 1 for `token_mean`, 1 / (loss tokens of its sample) for `sample_mean`.

    Divide the weighted sum over a whole step by the sum of `num_units` over the step, never by a micro-batch's own.

    Args:
        num_loss_tokens: Of each sample in packed order; a sample may have none.
        aggregation: How the step's mean is taken.
        dtype: Of the weights.
    Returns:
        Unnormalised weights, in packed order.
    """
    if aggregation == "token_mean":
        return torch.ones(int(num_loss_tokens.sum()), dtype=dtype, device=num_loss_tokens.device)
    return (1 / num_loss_tokens.clamp(min=1).to(dtype)).repeat_interleave(num_loss_tokens)


def num_units(num_loss_tokens: Int[Tensor, " samples"], *, aggregation: Aggregation) -> int:
    """Count what the step's mean is over: loss tokens for `token_mean`, samples that have any for `sample_mean`.

    Args:
        num_loss_tokens: Of each sample.
        aggregation: How the step's mean is taken.
    Returns:
        This part's share of the step's normaliser.
    """
    return int(num_loss_tokens.sum() if aggregation == "token_mean" else (num_loss_tokens > 0).sum())
