"""Trains the policy in steps, for every backend that runs packed micro-batches: what is trained now
and what waits for the step's end, mini-batches, statistics, one update or several, metrics.

A backend adds the model: how micro-batches run forward and backward, and the parameters.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import structlog
import torch
from numpy.typing import NDArray
from torch import Tensor

from relax_events.algorithms.objective import Objective
from relax_events.config import RunConfig
from relax_events.errors import RunFailed, StepNotFinite
from relax_events.events.routed_experts import ExpertShape
from relax_events.events.types import SampleReady
from relax_events.runtime.failpoints import failpoint
from relax_events.training.backend.learning_rate import compute_policy_learning_rate
from relax_events.training.backend.parameter_store import ParameterStore
from relax_events.training.backend.policy_model import TokenLogprobs
from relax_events.training.backend.protocol import StepMetrics
from relax_events.training.backend.step_sums import (
    MicroBatchSums,
    OptimizerStep,
    Totals,
    build_pass_metrics,
    build_step_metrics,
    gather_totals,
    sum_micro_batch,
)
from relax_events.training.batch.loss_batch import LossBatch, whiten_step
from relax_events.training.batch.mini_batches import MiniBatchBuffer
from relax_events.training.batch.packing import cut_by_cells
from relax_events.training.batch.sample_intake import SampleMedia
from relax_events.training.batch.shared_prefixes import PrefixSharing
from relax_events.training.batch.step_statistics import compute_second_moment_cutoff
from relax_events.training.ranks import GatheringRanks, Ranks

log = structlog.get_logger()


class PackedModel(Protocol):
    """What packing needs to know of a model."""

    vocab_size: int
    shares_rows: bool
    prefix_sharing: PrefixSharing | None

    @property
    def experts(self) -> ExpertShape | None:
        """Shape of the replayed routing; None where the model routes by itself."""


class PolicyTraining(ABC):
    """The part of a `TrainerBackend` that does not depend on how the model is laid out."""

    _model: PackedModel
    _media: SampleMedia
    _parameters: ParameterStore
    waits_for_step: bool
    """Whether all micro-batches run in `step`, because forward passes are collective."""

    def __init__(
        self, config: RunConfig, *, ranks: Ranks, data_ranks: GatheringRanks | None = None
    ) -> None:
        """Start empty, at version 0.

        Args:
            config: The run.
            ranks: This process and its peers.
            data_ranks: Those with different samples; by default all.
        """
        self.policy_version = 0
        self._config = config
        self._ranks = ranks
        self._data_ranks: GatheringRanks = data_ranks or ranks
        self._objective = Objective(
            config.algorithm, max_new_tokens=config.engine.sampling.max_new_tokens
        )
        self._micro_batches: list[MicroBatchSums] = []
        self._deferred: list[LossBatch] = []
        whole = config.algorithm.needs_whole_groups
        self._batch = MiniBatchBuffer(
            config.trainer,
            seed=config.run.seed,
            ranks=self._data_ranks,
            whole_prompt_groups=whole,
        )
        self._report_progress: Callable[[], None] = lambda: None

    @abstractmethod
    def _train_all(self, loss_batches: Sequence[LossBatch], *, cutoff: float | None = None) -> None:
        """Run micro-batches forward and backward, and record each; collective where the model is.

        Args:
            loss_batches: Of this rank, in order.
            cutoff: Largest squared log-ratio that is trained, if there is a bound.
        """

    @abstractmethod
    def _score_all(self, loss_batches: Sequence[LossBatch]) -> Iterator[NDArray[np.floating]]:
        """Yield the log-probabilities of the loss tokens of each micro-batch; collective where the
        model is.
        """

    @property
    def vocab_size(self) -> int:
        """Bound of the token ids that the model takes."""
        return self._model.vocab_size

    @property
    def experts(self) -> ExpertShape | None:
        """Shape of the replayed routing; None where the model routes by itself."""
        return self._model.experts

    def accumulate(self, micro_batch: Sequence[SampleReady]) -> None:
        """Run forward and backward on a micro-batch; see `TrainerBackend`. If statistics of
        the whole step are needed first, `step` runs it.
        """
        if not micro_batch:
            return
        # All parts are packed before the first is trained, so that an invalid sample is found
        # before anything was added.
        for part, loss_batch in [(part, self._pack(part)) for part in self._split(micro_batch)]:
            if not len(loss_batch.batch.targets):
                continue
            if self._config.trainer.has_mini_batches:
                self._defer(part, loss_batch)
            elif self.waits_for_step or self._config.algorithm.needs_whole_step:
                self._deferred.append(loss_batch)
            else:
                self._train_all([loss_batch])

    def _defer(self, samples: Sequence[SampleReady], loss_batch: LossBatch) -> None:
        """Keep samples for the mini-batches of their step, with old log-probabilities of the
        weights before it.
        """
        self._batch.add(samples, loss_batch.batch.num_loss_tokens)
        if not self.waits_for_step:
            (loss_batch,) = self._with_old_logprobs([loss_batch])
        self._deferred.append(loss_batch)

    def _with_old_logprobs(self, loss_batches: Sequence[LossBatch]) -> list[LossBatch]:
        """Add the old log-probabilities, where the trainer computes them, and drop what only the
        model needs.
        """
        algorithm = self._config.algorithm
        if algorithm.old_logprobs == "trainer" and algorithm.has_rewards:
            loss_batches = [
                one.with_old_logprobs(logprobs)
                for one, logprobs in zip(loss_batches, self._score_all(loss_batches), strict=True)
            ]
        return [one.without_model_inputs() for one in loss_batches]

    def on_progress(self, report_progress: Callable[[], None]) -> None:
        """Call this after each micro-batch that `step` runs; see `TrainerBackend`."""
        self._report_progress = report_progress

    def _split(self, micro_batch: Sequence[SampleReady]) -> Sequence[Sequence[SampleReady]]:
        """Split a micro-batch by its padded size where each sample has its own row."""
        if self._model.shares_rows:
            return [micro_batch]
        max_cells, whole = (
            self._config.trainer.max_tokens_per_micro_batch,
            self._config.algorithm.needs_whole_groups,
        )
        return cut_by_cells(micro_batch, max_cells=max_cells, whole_prompt_groups=whole)

    def _pack(self, samples: Sequence[SampleReady]) -> LossBatch:
        algorithm, model = self._config.algorithm, self._model
        sharing = model.prefix_sharing if self._config.trainer.share_prompts else None
        loss_batch = LossBatch.from_samples(
            samples,
            algorithm=algorithm,
            vocab_size=model.vocab_size,
            share_rows=model.shares_rows,
            sharing=sharing,
            experts=model.experts,
            trainer_version=self.policy_version,
        )
        if not len(loss_batch.batch.targets):
            return loss_batch
        return replace(loss_batch, batch=self._media.add_to(loss_batch.batch, samples))

    def _mini_batches(self) -> Iterator[tuple[int, list[LossBatch]]]:
        """Yield the micro-batches of each optimizer step, and its pass. The start is collective."""
        if not self._config.trainer.has_mini_batches:
            yield 0, self._deferred
            return
        if self.waits_for_step:
            self._deferred = self._with_old_logprobs(self._deferred)
        values = {
            sample_id: sample_values
            for deferred in self._deferred
            for sample_id, sample_values in deferred.values_by_sample().items()
        }
        is_empty = True
        for epoch, micro_batches in self._batch.mini_batches(self.policy_version):
            packed = [
                self._pack(part)
                for micro_batch in micro_batches
                for part in self._split(micro_batch)
            ]
            yield epoch, [one.with_values(values) for one in packed if len(one.batch.targets)]
            is_empty = False
        if is_empty:
            yield 0, []

    def _train_mini_batch(self, mini_batch: Sequence[LossBatch]) -> None:
        """Train the deferred micro-batches of an optimizer step; collective."""
        algorithm, cutoff = self._config.algorithm, None
        if algorithm.m2_threshold:
            scored = zip(mini_batch, self._score_all(mini_batch), strict=True)
            cutoff = compute_second_moment_cutoff(
                (_squared_log_ratios(*pair) for pair in scored),
                threshold=algorithm.m2_threshold,
                ranks=self._data_ranks,
            )
        self._train_all(mini_batch, cutoff=cutoff)

    def _compute_loss(
        self, loss_batch: LossBatch, result: TokenLogprobs, cutoff: float | None
    ) -> tuple[Tensor, Tensor]:
        """Return the loss of a micro-batch, not normalised, and its sums."""
        inputs = loss_batch.objective_inputs(result, cutoff=cutoff)
        tokens = self._objective(inputs)
        sums = sum_micro_batch(tokens, inputs, metrics=self._config.algorithm.spec.metrics)
        return (tokens.token_weights * tokens.losses).sum(), sums

    def _record(self, loss_batch: LossBatch, sums: Tensor, gradient_sum: Tensor) -> None:
        """Add the sums of a micro-batch to the step's.

        Args:
            loss_batch: The micro-batch.
            sums: From `_compute_loss`.
            gradient_sum: The sum of all gradients stays non-finite after the first micro-batch that
                broke one; it is read once, at the step's end.
        """
        batch = loss_batch.batch
        units = self._objective.num_units(torch.from_numpy(batch.num_loss_tokens))
        counts = (units, len(batch.targets), batch.num_tokens, len(loss_batch.sample_ids))
        device_sums = torch.cat([sums, gradient_sum.to(sums)[None]])
        self._micro_batches.append(MicroBatchSums(device_sums, counts, loss_batch.sample_ids))

    def step(self) -> StepMetrics:
        """Reduce, normalise, clip, update; see `TrainerBackend`."""
        learning_rate = compute_policy_learning_rate(self._config, step=self.policy_version)
        try:
            self._deferred = whiten_step(
                self._deferred, algorithm=self._config.algorithm, ranks=self._data_ranks
            )
            updates, pass_metrics = self._take_updates(learning_rate)
        except RunFailed:
            self.discard()
            raise
        self._reset_step()
        self.policy_version += 1
        metrics = build_step_metrics(updates, learning_rate=learning_rate)
        return (
            replace(metrics, algorithm_metrics={**metrics.algorithm_metrics, **pass_metrics})
            if self._config.trainer.has_mini_batches
            else metrics
        )

    def _take_updates(self, learning_rate: float) -> tuple[list[OptimizerStep], dict[str, float]]:
        """Take the optimizer steps of the train step; return them and the metrics of their passes.
        A step that is not finite is skipped.

        Raises:
            StepNotFinite: No step was finite.
        """
        updates: list[OptimizerStep] = []
        failed: list[StepNotFinite] = []
        is_stopped = False
        for number, (epoch, mini_batch) in enumerate(self._mini_batches()):
            self._train_mini_batch(mini_batch)
            try:
                update = self._update(
                    epoch, learning_rate, name=self._step_name(number), may_stop=bool(updates)
                )
            except StepNotFinite as error:
                failed.append(error)
                self._parameters.zero_gradients()
            else:
                is_stopped = update is None
                updates += [] if update is None else [update]
                failpoint("trainer.after_optimizer_step")
            self._micro_batches = []
            if is_stopped:
                break
        if not updates:
            raise failed[-1]
        for skipped in failed:
            log.error("mini_batch.skipped", error=str(skipped))
        return updates, build_pass_metrics(
            updates, num_not_finite=len(failed), is_stopped=is_stopped
        )

    def _update(
        self, epoch: int, learning_rate: float, *, name: str, may_stop: bool
    ) -> OptimizerStep | None:
        """Take an optimizer step with the accumulated gradients; None if the policy exceeds
        `trainer.max_kl`, and the gradients are discarded.

        Raises:
            StepNotFinite: Loss or gradient is not finite, on all ranks.
        """
        metrics = self._config.algorithm.spec.metrics
        totals, mismatch_max, rank_totals = gather_totals(
            self._micro_batches, ranks=self._data_ranks, name=name, metrics=metrics
        )
        if may_stop and self._exceeds_max_kl(totals):
            self._parameters.zero_gradients()
            return None
        grad_norm = self._reduced_grad_norm(totals, name=name)
        self._parameters.update(
            learning_rate=learning_rate,
            gradient_scale=min(1.0, self._config.trainer.max_grad_norm / (grad_norm + 1e-6)),
        )
        return OptimizerStep(epoch, totals, mismatch_max, rank_totals, grad_norm)

    def _step_name(self, number: int) -> str:
        """Return the name of an optimizer step for errors."""
        return f"train step {self.policy_version}" + (
            f", optimizer step {number}" if self._config.trainer.has_mini_batches else ""
        )

    def _exceeds_max_kl(self, totals: Totals) -> bool:
        """Return whether the policy's KL in this train step exceeds the bound."""
        bound = self._config.trainer.max_kl
        return bound > 0 and totals.policy_kl / totals.num_loss_tokens > bound

    def _reduced_grad_norm(self, totals: Totals, *, name: str) -> float:
        if not totals.num_loss_tokens:
            raise RunFailed(
                f"{name} holds no loss token on any rank; do its samples have completions?"
            )
        self._parameters.reduce_gradients(self._ranks)
        grad_norm = self._parameters.normalise_gradients(totals.num_units)
        if not math.isfinite(grad_norm):
            raise StepNotFinite(
                f"{name}: the gradient's norm must be finite, got {grad_norm} over all ranks; "
                "the weights are those before it; lower trainer.learning_rate"
            )
        return grad_norm

    def discard(self) -> None:
        """Discard the accumulated gradients; see `TrainerBackend`."""
        self._reset_step()
        self._parameters.zero_gradients()

    def _reset_step(self) -> None:
        self._micro_batches, self._deferred = [], []
        self._batch.clear()

    def skip_step(self) -> None:
        """Count up without an update; see `TrainerBackend`."""
        self.discard()
        self.policy_version += 1


def _squared_log_ratios(deferred: LossBatch, logprobs: NDArray[np.floating]) -> NDArray[np.float64]:
    squares: NDArray[np.float64] = np.square(
        logprobs.astype(np.float64) - deferred.values["rollout"]
    )
    return squares
