"""Estimates the KL divergence between two policies from tokens sampled from one of them."""

from __future__ import annotations

import math

from jaxtyping import Float
from torch import Tensor

from relax_events.algorithms.losses import MAX_LOG_RATIO
from relax_events.config.algorithm import KlEstimator


def kl_estimate(
    logprobs: Float[Tensor, " tokens"],
    *,
    base_logprobs: Float[Tensor, " tokens"],
    estimator: KlEstimator,
    behaviour_logprobs: Float[Tensor, " tokens"] | None = None,
    bound: float = math.inf,
) -> Float[Tensor, " tokens"]:
    """Estimate KL(policy || base) from one sampled token: with d = logprobs - base_logprobs, k1 =
    d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d, abs = |d|.

    k1 is unbiased and may be negative; k2 is biased with low variance; k3 is unbiased, never
    negative, and is also what `low_variance` names; abs is |k1|. The expected
    gradient of k1 as a loss is zero, that of k3 is the forward KL's. A name with `+` has its value
    and the gradient of k2, d times that of logprobs: on policy that is the gradient of KL(policy ||
    base) (straight-through).

    Args:
        logprobs: Of the policy, in nats.
        base_logprobs: Of the base distribution, in nats.
        estimator: Which of them.
        behaviour_logprobs: Of the behaviour policy, in nats. If given, the estimate is multiplied
            by the ratio of policy to behaviour policy, with its gradient, before it is bounded:
            value and gradient are then unbiased off-policy too. The gradient of k2 that `+` takes
            is multiplied by the ratio alone.
        bound: The value is kept within -bound and bound, in nats; beyond there is no gradient, but
            that of `+` is not bounded.
    Returns:
        The estimate at each token, in nats.
    Source: J. Schulman, Approximating KL divergence (joschu.net/blog/kl-approx.html); the ratio:
    DeepSeek-V3.2 (arXiv 2512.02556), section 3.1; abs and the straight-through forms: verl's
    `kl_penalty`; bounds: its `low_var_kl`, NeMo-RL's `kl_output_clamp_value`.
    """
    difference = logprobs - base_logprobs
    name = estimator.removesuffix("+")
    if name in ("k1", "abs"):
        estimate = difference.abs() if name == "abs" else difference
    elif name == "k2":
        estimate = difference.square() / 2
    else:
        estimate = (-difference).clamp(max=MAX_LOG_RATIO).exp() - 1 + difference
    ratio: Float[Tensor, " tokens"] | float = 1.0
    if behaviour_logprobs is not None:
        ratio = (logprobs - behaviour_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    estimate = (ratio * estimate).clamp(-bound, bound)
    if name == estimator:
        return estimate
    through = (difference * ratio).detach() * logprobs
    return estimate.detach() + (through - through.detach())
