"""Computes divergences between policy and teacher at each token, over a set of token ids or
estimated from the sampled token.

Each divergence is a sum of one term for each token id, with p the policy's and q the teacher's
probability of it:

    reverse_kl   p log(p / q) - p + q
    forward_kl   q log(q / p) - q + p
    jsd          a q log(q / m) + (1 - a) p log(p / m),  m = a q + (1 - a) p

No term is negative, and each is 0 only where p = q. Over a whole distribution the first two add up
to the KL divergences, since p and q both add up to 1; over a part of it they still pull p towards
q, which p log(p / q) alone does not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from relax_events.algorithms.losses import MAX_LOG_RATIO

Divergence = Literal["reverse_kl", "forward_kl", "jsd"]
Tail = Literal["tail", "renormalise", "truncate"]
MIN_TAIL = 1e-6
"""Probability outside a set below which float32's rounding is larger: the tail then counts as this,
and has no gradient."""


@dataclass(frozen=True, slots=True)
class TokenSet:
    """Log-probabilities, in nats, of the same token ids by both models; the policy's carry the
    gradient.
    """

    logprobs: Float[Tensor, "tokens ids"]
    teacher_logprobs: Float[Tensor, "tokens ids"]


def divergence(
    tokens: TokenSet, *, kind: Divergence, mixture: float, tail: Tail
) -> Float[Tensor, " tokens"]:
    """Compute the divergence of policy and teacher over a set of token ids.

    Args:
        tokens: See `TokenSet`.
        kind: Which divergence.
        mixture: The teacher's share a of what `jsd` compares with; at 0 that is the forward KL, at
            1 the reverse KL.
        tail: `tail` puts all other ids into one bin, which gives a lower bound of the whole
            divergence; `renormalise` scales both to add up to 1 over the set; `truncate` adds up
            the terms of the set alone.
    Returns:
        The divergence at each token, in nats.
    Source: GKD (arXiv 2306.13649), section 3 for the divergences and the ends of `mixture`.
    """
    return _terms(
        _completed(tokens.logprobs, tail), _completed(tokens.teacher_logprobs, tail), kind, mixture
    ).sum(-1)


def sampled_divergence(
    logprobs: Float[Tensor, " tokens"],
    *,
    teacher_logprobs: Float[Tensor, " tokens"],
    behaviour_logprobs: Float[Tensor, " tokens"],
    kind: Divergence,
    mixture: float,
) -> Float[Tensor, " tokens"]:
    """Estimate the divergence over the whole vocabulary from the sampled token: its term over its
    sampling probability.

    Value and gradient are unbiased for any behaviour policy, up to a clamp of the log-ratios
    at 20, and the value is never negative. For the reverse KL it is the ratio to the behaviour
    policy times the estimator k3, whose gradient is ratio * log(p / q) * grad log p: that of the
    policy gradient with advantage log(q / p). The others weigh by q over the sampling probability,
    whose variance is high where the teacher prefers tokens that the policy rarely samples: prefer a
    set of token ids for them.

    Args:
        logprobs: Of the policy, in nats; carries the gradient.
        teacher_logprobs: Of the teacher, in nats.
        behaviour_logprobs: Of the behaviour policy, in nats.
        kind: Which divergence.
        mixture: As in `divergence`.
    Returns:
        The estimate at each token, in nats.
    """
    ours, theirs = (
        (values - behaviour_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        for values in (logprobs, teacher_logprobs)
    )
    return _terms(ours, theirs, kind, mixture)


def _terms(
    ours: Float[Tensor, "*shape"], theirs: Float[Tensor, "*shape"], kind: Divergence, mixture: float
) -> Float[Tensor, "*shape"]:
    if kind == "jsd" and 0 < mixture < 1:
        middle = torch.logaddexp(theirs + math.log(mixture), ours + math.log1p(-mixture))
        return mixture * theirs.exp() * (theirs - middle) + (1 - mixture) * ours.exp() * (
            ours - middle
        )
    if kind == "forward_kl" or (kind == "jsd" and mixture == 0):
        ours, theirs = theirs, ours
    return ours.exp() * (ours - theirs) - ours.exp() + theirs.exp()


def _completed(logprobs: Float[Tensor, "tokens ids"], tail: Tail) -> Float[Tensor, "tokens bins"]:
    if tail == "renormalise":
        return logprobs - logprobs.logsumexp(-1, keepdim=True)
    if tail == "truncate":
        return logprobs
    rest = (1 - logprobs.exp().sum(-1, keepdim=True)).clamp(min=MIN_TAIL)
    return torch.cat([logprobs, rest.log()], -1)
