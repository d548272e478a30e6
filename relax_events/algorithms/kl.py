"""Estimates the KL divergence between two policies from tokens sampled from one of them."""

from __future__ import annotations

from typing import Literal

from jaxtyping import Float
from torch import Tensor

from relax_events.algorithms.losses import MAX_LOG_RATIO

KlEstimator = Literal["k1", "k2", "k3", "low_variance"]
LOW_VARIANCE_BOUND = 10.0


def kl_estimate(
    logprobs: Float[Tensor, " tokens"],
    *,
    base_logprobs: Float[Tensor, " tokens"],
    estimator: KlEstimator,
    behaviour_logprobs: Float[Tensor, " tokens"] | None = None,
) -> Float[Tensor, " tokens"]:
    """Estimate KL(policy || base) from one sampled token: with d = logprobs - base_logprobs, k1 =
    d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d.

    k1 is unbiased and may be negative; k2 is biased with low variance; k3 is unbiased, never
    negative; low_variance is k3 kept within -10 and 10. The value of k1 is unbiased, the expected
    gradient of k1 as a loss is zero, so use another one in a loss.

    Args:
        logprobs: Of the policy, in nats.
        base_logprobs: Of the base distribution, in nats.
        estimator: Which of them.
        behaviour_logprobs: Of the behaviour policy, in nats. If given, the estimate is multiplied
            by the ratio of policy to behaviour policy, with its gradient, before it is bounded:
            value and gradient are then unbiased off-policy too.
    Returns:
        The estimate at each token, in nats.
    Source: J. Schulman, Approximating KL divergence (joschu.net/blog/kl-approx.html); the ratio:
    DeepSeek-V3.2 (arXiv 2512.02556), section 3.1.
    """
    difference = logprobs - base_logprobs
    if estimator == "k1":
        estimate = difference
    elif estimator == "k2":
        estimate = difference.square() / 2
    else:
        estimate = (-difference).clamp(max=MAX_LOG_RATIO).exp() - 1 + difference
    if behaviour_logprobs is not None:
        estimate = (logprobs - behaviour_logprobs).clamp(
            -MAX_LOG_RATIO, MAX_LOG_RATIO
        ).exp() * estimate
    return (
        estimate.clamp(-LOW_VARIANCE_BOUND, LOW_VARIANCE_BOUND)
        if estimator == "low_variance"
        else estimate
    )
