"""Trains the policy: the objective, statistics and log-probabilities that it needs before, metrics,
and what only a policy does: its state has generators, and it can leave its device.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from relax_events.algorithms.objective import Objective
from relax_events.config import RunConfig
from relax_events.errors import RunFailed, StepNotFinite
from relax_events.events.routed_experts import ExpertShape
from relax_events.events.types import SampleReady
from relax_events.models.adapters import BASE_DIGEST, encode_base_digest
from relax_events.models.base_digest import compute_base_digest, require_same_base
from relax_events.models.offload import Offload
from relax_events.runtime.failpoints import failpoint
from relax_events.training.backend.determinism import (
    GENERATORS,
    generator_states,
    restore_generators,
)
from relax_events.training.backend.learning_rate import compute_policy_learning_rate
from relax_events.training.backend.policy_model import TokenLogprobs
from relax_events.training.backend.protocol import StepMetrics
from relax_events.training.backend.state import StateSource, TrainerState
from relax_events.training.backend.step_sums import (
    MicroBatchSums,
    OptimizerStep,
    Totals,
    add_imbalance,
    build_pass_metrics,
    build_step_metrics,
    find_worst_tokens,
    gather_totals,
    sum_micro_batch,
)
from relax_events.training.backend.step_training import (
    ModelPass,
    PackedModel,
    StepTraining,
    StepUpdates,
)
from relax_events.training.batch.loss_batch import LossBatch, whiten_step
from relax_events.training.batch.shared_prefixes import PrefixSharing
from relax_events.training.batch.step_statistics import compute_second_moment_cutoff
from relax_events.training.ranks import Ranks


class PolicyModelLayout(PackedModel, Protocol):
    """What packing needs to know of a policy."""

    prefix_sharing: PrefixSharing | None

    @property
    def module(self) -> nn.Module:
        """All parameters that this rank holds."""

    @property
    def experts(self) -> ExpertShape | None:
        """Shape of the replayed routing; None where the model routes by itself."""


class PolicyTraining(StepTraining[LossBatch, OptimizerStep, StepMetrics]):
    """The part of a `TrainerBackend` that does not depend on how the model is laid out."""

    _model: PolicyModelLayout
    _device: torch.device

    def __init__(
        self, config: RunConfig, *, ranks: Ranks, dtype: torch.dtype | None = None
    ) -> None:
        """Load this rank's part of the model of a run, at version 0; collective where several
        ranks hold it.

        Args:
            config: The run.
            ranks: This process and its peers.
            dtype: Of the weights instead of `model.dtype`, for tests in float64.
        Raises:
            ConfigError: The model can't be loaded or trained by this backend.
        """
        data_ranks = self._choose_data_ranks(ranks)
        self._config = config
        self._objective = Objective(
            config.algorithm, max_new_tokens=config.engine.sampling.max_new_tokens
        )
        self._offload = Offload(config.devices_directory)
        self._keeps_gradients = False
        super().__init__(
            config.trainer,
            seed=config.run.seed,
            ranks=ranks,
            data_ranks=data_ranks,
            mini_batch_ranks=data_ranks,
            whole_prompt_groups=config.algorithm.needs_whole_groups,
        )
        self._open_model(dtype or getattr(torch, config.model.dtype))

    def _clear_sums(self) -> None:
        self._micro_batches: list[MicroBatchSums] = []

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

    def _take_batch(self, samples: Sequence[SampleReady], packed: LossBatch) -> None:
        if self._trainer.has_mini_batches:
            self._defer(samples, packed)
        elif self.waits_for_step or self._config.algorithm.needs_whole_step:
            self._deferred.append(packed)
        else:
            self._train_all([packed])

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

    def _pack(self, samples: Sequence[SampleReady]) -> LossBatch:
        algorithm, model = self._config.algorithm, self._model
        sharing = model.prefix_sharing if self._trainer.share_prompts else None
        loss_batch = LossBatch.from_samples(
            samples,
            algorithm=algorithm,
            max_cells=self._max_cells,
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
        if not self._trainer.has_mini_batches:
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

    def _train_mini_batch(self, mini_batch: Iterable[LossBatch]) -> None:
        """Train the deferred micro-batches of an optimizer step; collective."""
        algorithm, cutoff, mini_batch = self._config.algorithm, None, list(mini_batch)
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
        self._micro_batches.append(
            MicroBatchSums(device_sums, counts, loss_batch.sample_ids, batch.num_loss_tokens)
        )

    def _add_imbalances(
        self, passes: Sequence[ModelPass[LossBatch]], imbalances: Sequence[float]
    ) -> None:
        """Add the load-balancing losses of the passes that were trained last, weighted as the
        aggregation says, to the sums of their micro-batches.
        """
        coefficient = self._config.algorithm.load_balancing_coefficient
        at = -sum(one.is_last for one in passes)
        for one, imbalance in zip(passes, imbalances, strict=True):
            add_imbalance(self._micro_batches[at], imbalance, coefficient=coefficient)
            at += one.is_last

    def _prepare_step(self) -> float:
        self._deferred = whiten_step(
            self._deferred, algorithm=self._config.algorithm, ranks=self._data_ranks
        )
        return compute_policy_learning_rate(self._config, step=self.policy_version)

    def _build_metrics(
        self, taken: StepUpdates[OptimizerStep], learning_rate: float
    ) -> StepMetrics:
        metrics = build_step_metrics(taken.updates, learning_rate=learning_rate)
        if not self._trainer.has_mini_batches:
            return metrics
        of_passes = build_pass_metrics(
            taken.updates, num_not_finite=taken.num_not_finite, is_stopped=taken.is_stopped
        )
        return replace(metrics, algorithm_metrics={**metrics.algorithm_metrics, **of_passes})

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
        if not totals.num_loss_tokens:
            raise RunFailed(
                f"{name} holds no loss token on any rank; do its samples have completions?"
            )
        grad_norm = self._reduce_gradients(totals.num_units)
        if not math.isfinite(grad_norm):
            raise StepNotFinite(
                f"{name}: the gradient's norm must be finite, got {grad_norm} over all ranks; "
                "the weights are those before it; lower trainer.learning_rate"
            )
        self._apply_gradients(grad_norm, learning_rate)
        failpoint("trainer.after_optimizer_step")
        worst = find_worst_tokens(self._micro_batches)
        return OptimizerStep(epoch, totals, mismatch_max, rank_totals, grad_norm, worst)

    def _exceeds_max_kl(self, totals: Totals) -> bool:
        """Return whether the policy's KL in this train step exceeds the bound."""
        bound = self._trainer.max_kl
        return bound > 0 and totals.policy_kl / totals.num_loss_tokens > bound

    def state(self) -> TrainerState:
        """Show weights in master precision, the optimizer's state and generators; see
        `TrainerBackend`.
        """
        others = generator_states(self._device) | encode_base_digest(self._compute_base_digest())
        return self._parameters.state(self.policy_version, others=others)

    def load_state(self, state: StateSource) -> None:
        """Resume from a state; see `TrainerBackend`. The state of a missing device's generator is
        ignored.
        """
        others = {
            name: state.read(name)
            for name in state.shapes
            if name == BASE_DIGEST or name.startswith(GENERATORS)
        }
        digest = others.get(BASE_DIGEST)
        if digest is not None and (expected := self._compute_base_digest()):
            recorded, folder = digest.cpu().numpy().tobytes(), self._config.model.path
            require_same_base(
                recorded, expected, folder=folder, what="the adapters were trained on"
            )
        self._load_parameters(state, without=others)
        restore_generators(others, self._device)

    def _compute_base_digest(self) -> bytes:
        """Return the digest of the adapters' base model; empty without adapters."""
        model = self._config.model
        return b"" if model.lora is None else compute_base_digest(model.path)

    def move_away(self) -> int:
        """Free the device's memory; see `OffloadingBackend`. Gradients are kept in the middle of a
        step.
        """
        self._keeps_gradients = bool(self._micro_batches)
        kept, rebuilt = self._parameters.memory(with_gradients=self._keeps_gradients)
        others = (one for one in self._model.module.parameters() if not one.requires_grad)
        return self._offload.move_away([*kept, *others], dropped=rebuilt)

    def bring_back(self) -> None:
        """Restore the state; see `OffloadingBackend`."""
        if self._offload.is_away:
            self._offload.bring_back()
            self._parameters.rebuild(with_gradients=self._keeps_gradients)


def _squared_log_ratios(deferred: LossBatch, logprobs: NDArray[np.floating]) -> NDArray[np.float64]:
    squares: NDArray[np.float64] = np.square(
        logprobs.astype(np.float64) - deferred.values["rollout"]
    )
    return squares
