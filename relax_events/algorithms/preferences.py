"""Losses of pairs: a chosen answer and a rejected one to the same prompt."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from relax_events.algorithms.losses import LossTokens, Surrogate
from relax_events.errors import ConfigError

FIGURES = ("preference_accuracy", "reward_margin", "chosen_reward", "rejected_reward")


def direct_preference(tokens: LossTokens, *, beta: float, label_smoothing: float = 0.0) -> Surrogate:
    """Compute -log sigmoid(h) with h = beta ((lp_c - ref_c) - (lp_r - ref_r)), sums over the answers' tokens (DPO).

    Every loss token of a pair carries the pair's loss, so that with `sample_mean` each pair counts once. beta (lp - ref) is what the policy
    takes an answer to be worth: the figures are its mean over chosen and over rejected answers, their difference, and the share of the pairs
    whose chosen answer is worth more.

    Args:
        tokens: See `LossTokens`; the samples are pairs side by side, the chosen answer first.
        beta: Strength of the pull towards the reference, per nat.
        label_smoothing: Share of the pairs that are taken to be labelled the wrong way round.
    Returns:
        As `losses.clipped`; nothing is clipped.
    Raises:
        ConfigError: The samples are no pairs, or the reference's log-probabilities are missing.
    Source: DPO (arXiv 2305.18290), equation 7; label smoothing: cDPO, in the same authors' code.
    """
    if tokens.ref_logprobs is None or len(tokens.num_loss_tokens) % 2:
        raise ConfigError(
            f"dpo needs pairs with the reference's log-probabilities, got {len(tokens.num_loss_tokens)} samples; mend the trainer backend"
        )
    sample_of = torch.arange(len(tokens.num_loss_tokens), device=tokens.logprobs.device).repeat_interleave(tokens.num_loss_tokens)
    difference = tokens.logprobs - tokens.ref_logprobs
    worth = beta * difference.new_zeros(len(tokens.num_loss_tokens)).index_add(0, sample_of, difference).reshape(-1, 2)
    margin = worth[:, 0] - worth[:, 1]
    losses = -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)
    pair_of = sample_of // 2
    values = ((margin > 0).to(margin.dtype), margin.detach(), worth[:, 0].detach(), worth[:, 1].detach())
    figures: dict[str, Float[Tensor, " tokens"]] = {name: value[pair_of] for name, value in zip(FIGURES, values, strict=True)}
    return Surrogate.unclipped(losses[pair_of], ratio=tokens.log_ratio.detach().exp(), figures=figures)
