"""Sums over a step, kept on the device during its micro-batches and added over ranks at its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from relax_events.algorithms.kl import kl_estimate
from relax_events.algorithms.losses import MAX_LOG_RATIO
from relax_events.algorithms.objective import ObjectiveInputs, TokenLosses
from relax_events.errors import StepNotFinite
from relax_events.training.ranks import Ranks


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over loss tokens; `loss` to `kl_estimate`, and `distillation`, are weighted as the
    aggregation says.
    """

    loss: float
    policy_loss: float
    kl_estimate: float
    entropy: float
    clip_low: float
    clip_high: float
    ratio: float
    mismatch_kl: float
    mismatch_abs: float
    behaviour_ratio: float
    behaviour_ratio_squared: float
    correction: float
    correction_clipped: float
    masked: float
    distillation: float
    teacher_kl: float
    num_rejected_by_veto: float
    num_rejected_by_divergence: float
    policy_kl: float
    num_units: float
    num_loss_tokens: float
    num_tokens: float
    num_samples: float


NUM_DEVICE_SUMS = 19
"""So many sums are computed on the device; the others are counts known on the host."""


@dataclass(frozen=True, slots=True)
class MicroBatchSums:
    """The sums of one micro-batch, not yet copied to the host."""

    device: Float[Tensor, " sums"]
    """The sums of Totals, the largest mismatch, the sums of the algorithm's metrics, the sum of
    all gradients."""
    counts: tuple[int, int, int, int]
    sample_ids: list[str]


def sum_micro_batch(
    tokens: TokenLosses, inputs: ObjectiveInputs, *, metrics: Sequence[str] = ()
) -> Float[Tensor, " sums"]:
    """Sum a micro-batch's per-token metrics in float64, in the order of Totals, then the largest
    mismatch, then `metrics`.

    Args:
        tokens: The objective's output.
        inputs: The objective's input.
        metrics: Names of the algorithm's metrics.
    """
    surrogate, weights = tokens.policy_loss, tokens.token_weights
    difference = (inputs.logprobs - inputs.rollout_logprobs).detach()
    behaviour_ratio = difference.double().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    rows = [
        weights * tokens.losses,
        weights * tokens.policy_losses,
        weights * tokens.kl,
        inputs.entropies,
        surrogate.clipped_low,
        surrogate.clipped_high,
        surrogate.ratio,
        kl_estimate(inputs.rollout_logprobs, base_logprobs=inputs.logprobs, estimator="k3"),
        difference.abs(),
        behaviour_ratio,
        behaviour_ratio.square(),
        tokens.correction.values,
        tokens.correction.outside,
        tokens.masked,
        weights * tokens.distillation,
        torch.zeros_like(difference)
        if inputs.teacher_logprobs is None
        else inputs.rollout_logprobs - inputs.teacher_logprobs,
        tokens.rejection.by_veto,
        tokens.rejection.by_divergence,
        torch.zeros_like(difference)
        if inputs.old_logprobs is None
        else _policy_kl(inputs.old_logprobs, inputs.logprobs),
    ]
    sums = torch.stack([row.detach().double().sum() for row in rows])
    largest = difference.abs().double().max() if len(difference) else sums.new_zeros(())
    algorithm_metrics = [
        (weights * surrogate.metrics[name]).detach().double().sum() for name in metrics
    ]
    return torch.stack([*sums, largest, *algorithm_metrics])


def _policy_kl(
    old_logprobs: Float[Tensor, " tokens"], logprobs: Float[Tensor, " tokens"]
) -> Float[Tensor, " tokens"]:
    return kl_estimate(old_logprobs, base_logprobs=logprobs.detach(), estimator="k3")


def gather_totals(
    micro_batches: Sequence[MicroBatchSums], *, ranks: Ranks, name: str, metrics: Sequence[str] = ()
) -> tuple[Totals, float, dict[str, float]]:
    """Add up an optimizer step over micro-batches and ranks; collective.

    Args:
        micro_batches: Of this rank, in order.
        ranks: All of them.
        name: Of the step, for errors.
        metrics: Names of the algorithm's metrics.
    Returns:
        Its sums, the largest mismatch, and the sums of the algorithm's metrics, weighted as the
        loss is.
    Raises:
        StepNotFinite: A loss or gradient is not finite, on any rank; raised on all, naming the
            samples of the first micro-batch that shows it.
    """
    device = (
        torch.stack([item.device for item in micro_batches]).cpu().numpy()
        if micro_batches
        else np.zeros((0, NUM_DEVICE_SUMS + 2 + len(metrics)))
    )
    counts = np.array([item.counts for item in micro_batches], np.float64).reshape(
        -1, len(fields(Totals)) - NUM_DEVICE_SUMS
    )
    broken = np.flatnonzero(~np.isfinite(device).all(axis=1))
    algorithm_metrics = device[:, NUM_DEVICE_SUMS + 1 : -1].sum(axis=0)
    sums = np.concatenate(
        [device[:, :NUM_DEVICE_SUMS].sum(axis=0), counts.sum(axis=0), algorithm_metrics]
    )
    row = np.array([len(broken), device[:, NUM_DEVICE_SUMS].max(initial=0.0), *sums])
    rows = ranks.all_gather(row)
    if rows[:, 0].any():
        _raise_not_finite(micro_batches[broken[0]] if len(broken) else None, ranks=ranks, name=name)
    totals = rows[:, 2:].sum(axis=0).tolist()
    num_totals = len(totals) - len(metrics)
    return (
        Totals(*totals[:num_totals]),
        float(rows[:, 1].max()),
        dict(zip(metrics, totals[num_totals:], strict=True)),
    )


def _raise_not_finite(broken: MicroBatchSums | None, *, ranks: Ranks, name: str) -> None:
    text = ""
    if broken is not None:
        loss, gradient_sum = float(broken.device[0]), float(broken.device[-1])
        text = (
            f"rank {ranks.rank}: loss {loss}, sum of gradients {gradient_sum} after the "
            f"micro-batch of samples {', '.join(broken.sample_ids)}"
        )
    texts = [other.decode() for other in ranks.all_gather_bytes(text.encode()) if other]
    raise StepNotFinite(
        f"{name}: loss and gradients must be finite; {'; '.join(texts)}. The weights are "
        "those before it; "
        "lower trainer.learning_rate or inspect these samples' log-probabilities and advantages"
    )
