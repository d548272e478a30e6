"""Sums over a step, kept on the device during its micro-batches and added over ranks at its end;
and the train step's metrics.

A train step has one optimizer step, or several with mini-batches or passes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
import orjson
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from relax_events.algorithms.kl import kl_estimate
from relax_events.algorithms.losses import MAX_LOG_RATIO
from relax_events.algorithms.objective import ObjectiveInputs, TokenLosses
from relax_events.errors import ConfigError, StepNotFinite
from relax_events.training.backend.protocol import StepMetrics, WorstToken
from relax_events.training.ranks import GatheringRanks


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over loss tokens; `loss` to `kl_estimate`, `distillation` and `imbalance` are weighted
    as the aggregation says.
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
    imbalance: float
    num_units: float
    num_loss_tokens: float
    num_tokens: float
    num_samples: float


NUM_NAMED = 3
"""Tokens in an error."""
FAR_NATS = 0.1
"""Rounding hardly ever moves the mean absolute difference so far."""
NUM_DEVICE_SUMS = 20
"""So many sums are computed on the device; the others are counts known on the host."""


@dataclass(frozen=True, slots=True)
class MicroBatchSums:
    """The sums of one micro-batch, not yet copied to the host."""

    device: Float[Tensor, " sums"]
    """The sums of Totals, the largest mismatch, its loss token, the sums of the algorithm's
    metrics, the sum of all gradients."""
    counts: tuple[int, int, int, int]
    sample_ids: list[str]
    num_loss_tokens: NDArray[np.integer]
    """Of each sample."""


def sum_micro_batch(
    tokens: TokenLosses, inputs: ObjectiveInputs, *, metrics: Sequence[str] = ()
) -> Float[Tensor, " sums"]:
    """Sum a micro-batch's per-token metrics in float64, in the order of Totals, then the largest
    mismatch and the number of its token, then `metrics`.

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
        weights * tokens.imbalance,
    ]
    sums = torch.stack([row.detach().double().sum() for row in rows])
    largest, position = (
        difference.abs().double().max(dim=0) if len(difference) else sums.new_zeros((2,))
    )
    algorithm_metrics = [
        (weights * surrogate.metrics[name]).detach().double().sum() for name in metrics
    ]
    return torch.stack([*sums, largest, position.to(sums), *algorithm_metrics])


def add_imbalance(micro_batch: MicroBatchSums, imbalance: float, *, coefficient: float) -> None:
    """Add a load-balancing loss that was computed apart from the others to the sums of its
    micro-batch.

    Args:
        micro_batch: Changed in place.
        imbalance: Weighted as the aggregation says.
        coefficient: Of it in the loss.
    """
    names = [item.name for item in fields(Totals)]
    micro_batch.device[names.index("imbalance")] += imbalance
    micro_batch.device[names.index("loss")] += coefficient * imbalance


def _policy_kl(
    old_logprobs: Float[Tensor, " tokens"], logprobs: Float[Tensor, " tokens"]
) -> Float[Tensor, " tokens"]:
    return kl_estimate(old_logprobs, base_logprobs=logprobs.detach(), estimator="k3")


def gather_totals(
    micro_batches: Sequence[MicroBatchSums],
    *,
    ranks: GatheringRanks,
    name: str,
    metrics: Sequence[str] = (),
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
        else np.zeros((0, NUM_DEVICE_SUMS + 3 + len(metrics)))
    )
    counts = np.array([item.counts for item in micro_batches], np.float64).reshape(
        -1, len(fields(Totals)) - NUM_DEVICE_SUMS
    )
    broken = np.flatnonzero(~np.isfinite(device).all(axis=1))
    algorithm_metrics = device[:, NUM_DEVICE_SUMS + 2 : -1].sum(axis=0)
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


def _raise_not_finite(broken: MicroBatchSums | None, *, ranks: GatheringRanks, name: str) -> None:
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


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """A completed optimizer step: its pass, the sums over its mini-batch, its gradient norm, and
    this rank's tokens in which engine and trainer differ most.
    """

    epoch: int
    totals: Totals
    mismatch_max: float
    algorithm_metrics: Mapping[str, float]
    grad_norm: float
    worst_tokens: tuple[WorstToken, ...] = ()


def find_worst_tokens(micro_batches: Sequence[MicroBatchSums]) -> tuple[WorstToken, ...]:
    """Return the tokens in which engine and trainer differ most, at most one of a micro-batch."""
    worst = []
    for item in micro_batches:
        if not item.num_loss_tokens.sum():
            continue
        difference, position = item.device[NUM_DEVICE_SUMS : NUM_DEVICE_SUMS + 2].tolist()
        ends = np.cumsum(item.num_loss_tokens)
        sample = int(np.searchsorted(ends, position, side="right"))
        number = int(position - ends[sample] + item.num_loss_tokens[sample])
        worst.append(WorstToken(difference, item.sample_ids[sample], number))
    return tuple(sorted(worst, reverse=True)[:NUM_NAMED])


def build_step_metrics(updates: Sequence[OptimizerStep], *, learning_rate: float) -> StepMetrics:
    """Return the metrics of a train step.

    Means are over all optimizer steps, each token counted in each pass. Metrics that
    compare engine and trainer are those of the first step alone, before the weights moved; counts
    are those of the first pass.

    Args:
        updates: At least one, in order.
        learning_rate: Of all of them.
    """
    totals, first = _sum_totals([update.totals for update in updates]), updates[0].totals
    once = _sum_totals([update.totals for update in updates if update.epoch == updates[0].epoch])
    units, tokens = totals.num_units, totals.num_loss_tokens
    return StepMetrics(
        loss=totals.loss / units,
        policy_loss=totals.policy_loss / units,
        kl_estimate=totals.kl_estimate / units,
        distill_loss=totals.distillation / units,
        load_balancing_loss=totals.imbalance / units,
        teacher_kl=totals.teacher_kl / tokens,
        entropy=totals.entropy / tokens,
        clip_low_fraction=totals.clip_low / tokens,
        clip_high_fraction=totals.clip_high / tokens,
        clip_fraction=(totals.clip_low + totals.clip_high) / tokens,
        mean_ratio=totals.ratio / tokens,
        mismatch_kl=first.mismatch_kl / first.num_loss_tokens,
        mismatch_mean_abs=first.mismatch_abs / first.num_loss_tokens,
        mismatch_max_abs=updates[0].mismatch_max,
        effective_sample_ratio=first.behaviour_ratio**2
        / (first.num_loss_tokens * first.behaviour_ratio_squared),
        correction_mean=totals.correction / tokens,
        correction_clip_fraction=totals.correction_clipped / tokens,
        masked_fraction=totals.masked / tokens,
        num_rejected_by_veto=int(once.num_rejected_by_veto),
        num_rejected_by_divergence=int(once.num_rejected_by_divergence),
        grad_norm=sum(update.grad_norm for update in updates) / len(updates),
        learning_rate=learning_rate,
        num_loss_tokens=int(once.num_loss_tokens),
        num_tokens=int(once.num_tokens),
        num_samples=int(once.num_samples),
        algorithm_metrics={
            name: sum(update.algorithm_metrics[name] for update in updates) / units
            for name in updates[0].algorithm_metrics
        },
        worst_tokens=updates[0].worst_tokens,
    )


def require_agreement(
    first: StepMetrics, *, bound: float, policy_version: int, ranks: GatheringRanks
) -> None:
    """Require that the log-probabilities of a run's first train step, computed by engine and
    trainer with the same weights, differ by rounding at most; collective where they don't.

    Args:
        first: Metrics of the step.
        bound: Of `mismatch_kl`, in nats per token; 0 takes any.
        policy_version: Of the weights.
        ranks: All of them, which have the same `mismatch_kl`.
    Raises:
        ConfigError: They differ, on all ranks; the text says by how much and in which tokens.
    """
    if not bound or first.mismatch_kl <= bound:
        return
    rows = ranks.all_gather_bytes(orjson.dumps([tuple(token) for token in first.worst_tokens]))
    worst = sorted({WorstToken(*one) for row in rows for one in orjson.loads(row)}, reverse=True)
    places = ", ".join(
        f"{token.difference:.3g} at sampled token {token.number} of sample {token.sample_id}"
        for token in worst[:NUM_NAMED]
    )
    remedy = (
        "their weights or prompts are not the same: see that relax doctor finds every tensor of "
        "model.path, and that engine.name supports the model"
        if first.mismatch_mean_abs > FAR_NATS
        else "if model.dtype or the routing of experts explains it, set model.routing_replay = "
        "'rollout', model.dtype = 'float32', or trainer.max_start_mismatch above it"
    )
    raise ConfigError(
        f"engine and trainer compute other log-probabilities for policy version {policy_version}: "
        f"mismatch_kl must be <= trainer.max_start_mismatch = {bound:g} nats a token, got "
        f"{first.mismatch_kl:.3g} over {first.num_loss_tokens} tokens (mean absolute difference "
        f"{first.mismatch_mean_abs:.3g}; largest: {places}); {remedy}"
    )


def build_pass_metrics(
    updates: Sequence[OptimizerStep], *, num_not_finite: int, is_stopped: bool
) -> dict[str, float]:
    """Return the metrics of a train step's passes.

    Args:
        updates: The completed optimizer steps.
        num_not_finite: Steps that were skipped because loss or gradient was not finite.
        is_stopped: Whether the remaining steps were skipped because of `trainer.max_kl`.
    """
    first, last = (
        _sum_totals([one.totals for one in updates if one.epoch == updates[end].epoch])
        for end in (0, -1)
    )
    return {
        "num_optimizer_steps": float(len(updates)),
        "num_mini_batches_not_finite": float(num_not_finite),
        "is_stopped_by_kl": float(is_stopped),
        "first_epoch_policy_kl": first.policy_kl / first.num_loss_tokens,
        "last_epoch_policy_kl": last.policy_kl / last.num_loss_tokens,
        "last_epoch_clip_fraction": (last.clip_low + last.clip_high) / last.num_loss_tokens,
    }


def _sum_totals(totals: Sequence[Totals]) -> Totals:
    return Totals(*(sum(getattr(one, item.name) for one in totals) for item in fields(Totals)))
