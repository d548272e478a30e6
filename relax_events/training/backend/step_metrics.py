"""Builds the metrics of a train step from its optimizer steps: usually one, several with
mini-batches or passes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from relax_events.training.backend.protocol import StepMetrics
from relax_events.training.backend.step_sums import Totals


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """A completed optimizer step: its pass, the sums over its mini-batch, and its gradient norm."""

    epoch: int
    totals: Totals
    mismatch_max: float
    algorithm_metrics: Mapping[str, float]
    grad_norm: float


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
