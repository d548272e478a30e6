"""Computes preference losses of pairs: a chosen and a rejected response to the same prompt."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import logsigmoid

from relax_events.algorithms.losses import LossTokens, PolicyLossOutput
from relax_events.errors import ConfigError

METRICS = ("preference_accuracy", "reward_margin", "chosen_reward", "rejected_reward")


def dpo_loss(
    tokens: LossTokens,
    *,
    dpo_beta: float,
    label_smoothing: float = 0.0,
    length_normalised: bool = False,
    nll_coefficient: float = 0.0,
) -> PolicyLossOutput:
    """Compute -log sigmoid(h) with h = dpo_beta ((lp_c - ref_c) - (lp_r - ref_r)), sums over the
    responses' tokens (DPO).

    Every loss token of a pair has the pair's loss, so that with `sample_mean` each pair counts
    once. beta (lp - ref) is the implicit reward. The metrics are its mean over chosen and over
    rejected responses, the difference of the two, and the share of pairs whose chosen response has
    the higher one.

    Args:
        tokens: See `LossTokens`; the samples are pairs side by side, the chosen response first.
        dpo_beta: Strength of the KL constraint to the reference, per nat.
        label_smoothing: Assumed share of pairs with swapped labels.
        length_normalised: Means over the responses' tokens in place of sums.
        nll_coefficient: Weight of the chosen response's negative log-likelihood, averaged over its
            tokens.
    Returns:
        As `losses.ppo_clip_loss`; nothing is clipped.
    Raises:
        ConfigError: The samples are not pairs, or the reference's log-probabilities are missing.
    Source: DPO (arXiv 2305.18290), equation 7; label smoothing: cDPO, in the same authors' code.
    Length-normalised: Tulu 3
        (arXiv 2411.15124), section 5.1. Negative log-likelihood: Iterative reasoning preference
        optimization (arXiv 2404.19733), equation 1.
    """
    implicit_rewards = dpo_beta * _log_ratios(tokens, mean=length_normalised)
    margin = implicit_rewards[:, 0] - implicit_rewards[:, 1]
    losses = -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)
    if nll_coefficient:
        losses = (
            losses - nll_coefficient * _sum_by_response(tokens, tokens.logprobs, mean=True)[:, 0]
        )
    return _spread_over_pairs(tokens, losses=losses, implicit_rewards=implicit_rewards)


def ipo_loss(
    tokens: LossTokens, *, dpo_beta: float, length_normalised: bool = True
) -> PolicyLossOutput:
    """Compute (h - 1 / (2 dpo_beta))^2 with h = (lp_c - ref_c) - (lp_r - ref_r): the margin has a
    target value (IPO).

    Args:
        tokens: As `dpo_loss`.
        dpo_beta: Half the inverse of the target margin, per nat; the paper's tau.
        length_normalised: Means over the responses' tokens in place of sums.
    Returns:
        As `dpo_loss`, with the same metrics.
    Raises:
        ConfigError: As `dpo_loss`.
    Source: IPO: A general theoretical paradigm to understand learning from human preferences (arXiv
    2310.12036), equation 17; means over
        the tokens: as TRL's DPO trainer has it.
    """
    ratios = _log_ratios(tokens, mean=length_normalised)
    return _spread_over_pairs(
        tokens,
        losses=(ratios[:, 0] - ratios[:, 1] - 1 / (2 * dpo_beta)).square(),
        implicit_rewards=dpo_beta * ratios,
    )


def _log_ratios(tokens: LossTokens, *, mean: bool) -> Float[Tensor, "pairs 2"]:
    """Return the policy's log-probability of each response minus the reference's, in nats."""
    if tokens.ref_logprobs is None or len(tokens.num_loss_tokens) % 2:
        raise ConfigError(
            "preferences need pairs with the reference's log-probabilities, got "
            f"{len(tokens.num_loss_tokens)} samples; fix the trainer backend"
        )
    return _sum_by_response(tokens, tokens.logprobs - tokens.ref_logprobs, mean=mean)


def _sum_by_response(
    tokens: LossTokens, values: Float[Tensor, " tokens"], *, mean: bool
) -> Float[Tensor, "pairs 2"]:
    """Sum the values over each response, or take their mean."""
    sums = values.new_zeros(len(tokens.num_loss_tokens)).index_add(
        0, _index_samples(tokens), values
    )
    if mean:
        sums = sums / tokens.num_loss_tokens.clamp(min=1).to(sums.dtype)
    return sums.reshape(-1, 2)


def _index_samples(tokens: LossTokens) -> Int[Tensor, " tokens"]:
    return torch.arange(
        len(tokens.num_loss_tokens), device=tokens.logprobs.device
    ).repeat_interleave(tokens.num_loss_tokens)


def _spread_over_pairs(
    tokens: LossTokens,
    *,
    losses: Float[Tensor, " pairs"],
    implicit_rewards: Float[Tensor, "pairs 2"],
) -> PolicyLossOutput:
    """Return the pair's loss and metrics for every loss token."""
    pair_of, implicit_rewards = _index_samples(tokens) // 2, implicit_rewards.detach()
    margin = implicit_rewards[:, 0] - implicit_rewards[:, 1]
    values = ((margin > 0).to(margin.dtype), margin, implicit_rewards[:, 0], implicit_rewards[:, 1])
    metrics: dict[str, Float[Tensor, " tokens"]] = {
        name: value[pair_of] for name, value in zip(METRICS, values, strict=True)
    }
    return PolicyLossOutput.unclipped(
        losses[pair_of], ratio=tokens.log_ratio.detach().exp(), metrics=metrics
    )
