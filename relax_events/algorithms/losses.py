"""Computes policy losses token by token. `aggregation` defines the mean over a step.

Every function takes the loss tokens of a micro-batch, concatenated without padding, and returns a
loss for each of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped here before exp: e^20 is far outside any clip range, and inf * 0 in the
backward pass would give NaN."""

NO_METRICS: Mapping[str, Float[Tensor, " tokens"]] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTokens:
    """The inputs of a policy loss.

    Attributes:
        logprobs: Of the weights being trained, in nats; carries the gradient.
        old_logprobs: Of the old policy, the denominator of the ratio, in nats.
        advantages: Unitless.
        num_loss_tokens: Of each sample in packed order; a sample may have none.
        ref_logprobs: Of the reference model, in nats, where the algorithm or a KL term needs them.
    """

    logprobs: Float[Tensor, " tokens"]
    old_logprobs: Float[Tensor, " tokens"]
    advantages: Float[Tensor, " tokens"]
    num_loss_tokens: Int[Tensor, " samples"]
    ref_logprobs: Float[Tensor, " tokens"] | None = None

    @property
    def log_ratio(self) -> Float[Tensor, " tokens"]:
        """Log of the ratio of the trained policy to the old one."""
        return self.logprobs - self.old_logprobs

    def sample_means(self, values: Float[Tensor, " tokens"]) -> Float[Tensor, " tokens"]:
        """Return for each token the mean of the values over its sample's loss tokens."""
        return sample_sums(values, num_loss_tokens=self.num_loss_tokens, mean=True)


@dataclass(frozen=True, slots=True)
class PolicyLossOutput:
    """Per-token policy loss and clip marks. With a sequence-level ratio all tokens of a sample have
    the same ratio.

    `metrics` has the names in the spec's `metrics`, a detached value for each token; a step reports
    their means, aggregated as the loss.
    """

    losses: Float[Tensor, " tokens"]
    ratio: Float[Tensor, " tokens"]
    clipped_low: Bool[Tensor, " tokens"]
    clipped_high: Bool[Tensor, " tokens"]
    metrics: Mapping[str, Float[Tensor, " tokens"]] = field(default_factory=dict)

    @classmethod
    def unclipped(
        cls,
        losses: Float[Tensor, " tokens"],
        *,
        ratio: Float[Tensor, " tokens"],
        metrics: Mapping[str, Float[Tensor, " tokens"]] = NO_METRICS,
    ) -> PolicyLossOutput:
        """Create an output without clipping; the ratio is only reported."""
        none = torch.zeros_like(ratio, dtype=torch.bool)
        return cls(
            losses=losses,
            ratio=ratio.detach(),
            clipped_low=none,
            clipped_high=none,
            metrics=metrics,
        )


def sample_sums(
    values: Float[Tensor, " tokens"],
    *,
    num_loss_tokens: Int[Tensor, " samples"],
    mean: bool = False,
) -> Float[Tensor, " tokens"]:
    """Return for each token the sum, or the mean, of the values over its sample's loss tokens."""
    owners = torch.arange(len(num_loss_tokens), device=values.device).repeat_interleave(
        num_loss_tokens
    )
    sums = values.new_zeros(len(num_loss_tokens)).index_add(0, owners, values)
    if mean:
        sums = sums / num_loss_tokens.clamp(min=1).to(values.dtype)
    return sums[owners]


def ppo_clip_loss(
    tokens: LossTokens, *, clip_low: float, clip_high: float, dual_clip: float = 0.0
) -> PolicyLossOutput:
    """Compute max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A) for each token, with r =
    exp(logprobs - old_logprobs).

    A token counts as clipped only where the clipped branch is the one taken, so its gradient is
    zero.

    Args:
        tokens: See `LossTokens`.
        clip_low: Lower clip range, 0.2 means a ratio of 0.8.
        clip_high: Upper clip range, 0.2 means a ratio of 1.2.
        dual_clip: Bounds the loss by -dual_clip A where the advantage is negative; 0 for no
            bound.
    Returns:
        Losses, and the detached ratio and clip marks.
    Source: PPO (arXiv 1707.06347), equation 7; two ranges: DAPO (arXiv 2503.14476), section 3.1;
    dual clip: arXiv 1912.09729.
    """
    return _clip_loss(
        tokens.log_ratio,
        advantages=tokens.advantages,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
    )


def gspo_loss(
    tokens: LossTokens, *, clip_low: float, clip_high: float, dual_clip: float = 0.0
) -> PolicyLossOutput:
    """Compute the clipped loss with one ratio for each sample: s = exp(mean over its loss tokens of
    logprobs - old_logprobs) (GSPO).

    Every loss token of a sample has the sample's loss, so that with `sample_mean` each sample
    counts once, as in the paper. A sample is clipped as a whole. As s varies far less than the
    ratio of a token, the clip ranges are around 3e-4 and 4e-4.

    Args:
        tokens: See `LossTokens`; the advantages are the same at all tokens of a sample.
        clip_low: Lower clip range, 3e-4 means a ratio of 0.9997.
        clip_high: Upper clip range, 4e-4 means a ratio of 1.0004.
        dual_clip: As in `ppo_clip_loss`.
    Returns:
        As `ppo_clip_loss`.
    Source: GSPO (arXiv 2507.18071), equations 5 and 7; clip ranges: section 5.1.
    """
    means = tokens.sample_means(tokens.log_ratio)
    return _clip_loss(
        means,
        advantages=tokens.advantages,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
    )


def gspo_token_loss(
    tokens: LossTokens, *, clip_low: float, clip_high: float, dual_clip: float = 0.0
) -> PolicyLossOutput:
    """Compute the GSPO loss with the gradient of each token's own log-probability, so that
    advantages may differ within a sample (GSPO-token).

    Args:
        tokens: See `LossTokens`.
        clip_low: As in `gspo_loss`.
        clip_high: As in `gspo_loss`.
        dual_clip: As in `ppo_clip_loss`.
    Returns:
        As `ppo_clip_loss`.
    Source: GSPO (arXiv 2507.18071), section 4.3 (GSPO-token).
    """
    log_ratio = (
        tokens.sample_means(tokens.log_ratio).detach() + tokens.logprobs - tokens.logprobs.detach()
    )
    return _clip_loss(
        log_ratio,
        advantages=tokens.advantages,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
    )


def _clip_loss(
    log_ratio: Float[Tensor, " tokens"],
    *,
    advantages: Float[Tensor, " tokens"],
    clip_low: float,
    clip_high: float,
    dual_clip: float,
) -> PolicyLossOutput:
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    losses = torch.maximum(
        -ratio * advantages, -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    )
    if dual_clip:
        losses = torch.where(advantages < 0, torch.minimum(losses, -dual_clip * advantages), losses)
    ratio = ratio.detach()
    high = (ratio > 1 + clip_high) & (advantages > 0)
    return PolicyLossOutput(
        losses=losses,
        ratio=ratio,
        clipped_low=(ratio < 1 - clip_low) & (advantages < 0),
        clipped_high=high | ((ratio > dual_clip) & (advantages < 0)) if dual_clip else high,
    )


def sapo_loss(
    tokens: LossTokens, *, gate_positive: float, gate_negative: float
) -> PolicyLossOutput:
    """Compute -(4 / tau) sigmoid(tau (r - 1)) A: a gradient that fades smoothly as the ratio leaves
    1 (SAPO).

    A token counts as clipped where the gradient of the gate is less than half of that at r = 1.

    Args:
        tokens: See `LossTokens`.
        gate_positive: Temperature tau where the advantage is positive.
        gate_negative: Temperature tau elsewhere; higher fades faster.
    Returns:
        As `ppo_clip_loss`.
    Source: SAPO (arXiv 2511.20347), section 3.
    """
    ratio = tokens.log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    is_positive = tokens.advantages > 0
    temperatures = torch.where(
        is_positive, torch.full_like(ratio, gate_positive), torch.full_like(ratio, gate_negative)
    )
    gate = torch.sigmoid(temperatures * (ratio - 1))
    losses = -4 / temperatures * gate * tokens.advantages
    ratio = ratio.detach()
    is_faded = 4 * (gate * (1 - gate)).detach() < 0.5
    return PolicyLossOutput(
        losses=losses,
        ratio=ratio,
        clipped_low=is_faded & (ratio < 1),
        clipped_high=is_faded & (ratio > 1),
    )


def cispo_loss(tokens: LossTokens, *, clip_low: float, clip_high: float) -> PolicyLossOutput:
    """Compute -w A logprobs with the weight w = clip(r, 1 - clip_low, 1 + clip_high), which carries
    no gradient (CISPO).

    The weight is clipped for either sign of the advantage, and every token keeps its gradient.

    Args:
        tokens: See `LossTokens`.
        clip_low: Lower clip range; 1 for none.
        clip_high: Upper clip range, 4 means a weight of at most 5.
    Returns:
        As `ppo_clip_loss`; the marks are the tokens whose weight was clipped.
    Source: MiniMax-M1 (arXiv 2506.13585), equations 4 and 5.
    """
    ratio = tokens.log_ratio.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    losses = -ratio.clamp(1 - clip_low, 1 + clip_high) * tokens.advantages * tokens.logprobs
    return PolicyLossOutput(
        losses=losses,
        ratio=ratio,
        clipped_low=ratio < 1 - clip_low,
        clipped_high=ratio > 1 + clip_high,
    )


def gmpo_loss(tokens: LossTokens, *, clip_low: float, clip_high: float) -> PolicyLossOutput:
    """Compute -g A with g = exp(mean over the sample's loss tokens of the clipped log-ratio)
    (GMPO).

    The log-ratio of each token is clipped before the mean, on one side only:
    at most clip_high where the advantage is positive, at least -clip_low where it is negative. A
    clipped token has no gradient, the others of its sample keep theirs. Every loss token has the
    sample's loss, so that with `sample_mean` each sample counts once, as in the paper.

    Args:
        tokens: See `LossTokens`; the advantages are the same at all tokens of a sample.
        clip_low: In nats, 0.4 means a ratio of e^-0.4.
        clip_high: In nats, 0.4 means a ratio of e^0.4.
    Returns:
        As `ppo_clip_loss`, with g as the ratio; the marks are per token.
    Source: Geometric-Mean Policy Optimization (arXiv 2507.20673), section 3, with its token-level
    clipping; range: section 4.
    """
    log_ratio, advantages = tokens.log_ratio, tokens.advantages
    bounded = torch.where(
        advantages > 0, log_ratio.clamp(max=clip_high), log_ratio.clamp(min=-clip_low)
    )
    ratio = tokens.sample_means(bounded).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    log_ratio = log_ratio.detach()
    return PolicyLossOutput(
        losses=-ratio * advantages,
        ratio=ratio.detach(),
        clipped_low=(log_ratio < -clip_low) & (advantages < 0),
        clipped_high=(log_ratio > clip_high) & (advantages > 0),
    )


def dppo_tv_loss(tokens: LossTokens, *, trust_radius: float, ratio_cap: float) -> PolicyLossOutput:
    """Compute -w A logprobs, but 0 where the policy is outside a trust region and A pushes it
    further (DPPO, binary total variation).

    With p and q the token's probability under the policy and the old one, the divergence is |p -
    q|, that of the binary choice between this token and all others. Where it exceeds the radius,
    tokens with A > 0 and p > q, or A < 0 and p < q, have no gradient. The weight w = min(p / q,
    ratio_cap) has no gradient.

    Args:
        tokens: See `LossTokens`.
        trust_radius: Largest divergence, a difference of probabilities.
        ratio_cap: Largest weight.
    Returns:
        As `ppo_clip_loss`; the marks are the tokens without a gradient, high where the advantage is
        positive.
    Source: DPPO: Rethinking the trust region in LLM reinforcement learning (arXiv 2602.04879),
    Binary-TV; the weight as in its code.
    """
    divergence = (tokens.logprobs.detach().exp() - tokens.old_logprobs.exp()).abs()
    return _trust_region_loss(
        tokens, divergence=divergence, trust_radius=trust_radius, ratio_cap=ratio_cap
    )


def dppo_kl_loss(tokens: LossTokens, *, trust_radius: float, ratio_cap: float) -> PolicyLossOutput:
    """Compute the DPPO loss with KL(old || policy) of the binary choice: q log(q / p) + (1 - q)
    log((1 - q) / (1 - p)).

    Args:
        tokens: See `LossTokens`.
        trust_radius: Largest divergence, in nats.
        ratio_cap: Largest weight.
    Returns:
        As `dppo_tv_loss`.
    Source: DPPO: Rethinking the trust region in LLM reinforcement learning (arXiv 2602.04879),
    Binary-KL; the weight as in its code.
    """
    logprobs, old = tokens.logprobs.detach(), tokens.old_logprobs
    smallest = torch.finfo(logprobs.dtype).tiny
    others, old_others = ((-torch.expm1(values)).clamp(min=smallest) for values in (logprobs, old))
    divergence = old.exp() * (old - logprobs) + old_others * (old_others / others).log()
    return _trust_region_loss(
        tokens, divergence=divergence, trust_radius=trust_radius, ratio_cap=ratio_cap
    )


def _trust_region_loss(
    tokens: LossTokens,
    *,
    divergence: Float[Tensor, " tokens"],
    trust_radius: float,
    ratio_cap: float,
) -> PolicyLossOutput:
    log_ratio, advantages = tokens.log_ratio.detach(), tokens.advantages
    is_far = divergence > trust_radius
    high, low = (
        is_far & (log_ratio > 0) & (advantages > 0),
        is_far & (log_ratio < 0) & (advantages < 0),
    )
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    losses = (-ratio.clamp(max=ratio_cap) * advantages * tokens.logprobs).masked_fill(
        high | low, 0.0
    )
    return PolicyLossOutput(losses=losses, ratio=ratio, clipped_low=low, clipped_high=high)


def importance_sampling_loss(tokens: LossTokens) -> PolicyLossOutput:
    """Compute -r A with r = exp(logprobs - old_logprobs), without clipping: the policy gradient
    on samples of the old policy.

    Source: PPO (arXiv 1707.06347), equation 6.
    """
    ratio = tokens.log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return PolicyLossOutput.unclipped(-ratio * tokens.advantages, ratio=ratio)


def reinforce_loss(tokens: LossTokens) -> PolicyLossOutput:
    """Compute -A logprobs, whose gradient is REINFORCE's; the ratio is only reported.

    Source: RLOO: Back to basics (arXiv 2402.14740).
    """
    ratio = tokens.log_ratio.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return PolicyLossOutput.unclipped(-tokens.advantages * tokens.logprobs, ratio=ratio)
