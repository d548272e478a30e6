"""Implements the critic of the backend `torch`: a value model on one device and its optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import structlog
import torch
from numpy.typing import NDArray
from torch import Tensor

from relax_events.algorithms.value_loss import value_losses
from relax_events.config import RunConfig
from relax_events.errors import RunFailed, StepNotFinite
from relax_events.events.types import SampleReady
from relax_events.media.library import MediaLibrary
from relax_events.models.causal_lm import choose_device
from relax_events.training.backend.determinism import make_deterministic
from relax_events.training.backend.flat_parameters import FlatParameters
from relax_events.training.backend.learning_rate import compute_scheduled_learning_rate
from relax_events.training.backend.protocol import ValueMetrics
from relax_events.training.backend.scoring import score_in_own_rows
from relax_events.training.backend.state import StateSource, TrainerState
from relax_events.training.backend.value_model import ValueModel
from relax_events.training.batch.loss_batch import mask_truncated_samples
from relax_events.training.batch.mini_batches import MiniBatchBuffer
from relax_events.training.batch.packing import PackedBatch, cut_by_cells, gather_loss_values, pack
from relax_events.training.batch.row_layout import TokenSequence
from relax_events.training.batch.sample_intake import SampleMedia
from relax_events.training.ranks import SingleRank

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _CriticBatch:
    batch: PackedBatch
    advantages: NDArray[np.float64]
    old: NDArray[np.float64]
    """The recorded values of its loss tokens."""


@dataclass(frozen=True, slots=True)
class _Update:
    """An optimizer step: sums over its loss tokens, and the norm of its gradient."""

    loss: float
    clipped: float
    num_loss_tokens: int
    grad_norm: float


class TorchCritic:
    """Implements `Critic`. On the CPU the same micro-batches in the same order give the same
    bits.
    """

    def __init__(self, config: RunConfig, *, dtype: torch.dtype | None = None) -> None:
        """Load the critic of a run in its initial state.

        Args:
            config: The run.
            dtype: Of the weights instead of `model.dtype`, for tests in float64.
        Raises:
            ConfigError: The model can't be loaded.
        """
        critic, model, self._algorithm = config.critic, config.model, config.algorithm
        device = choose_device(model.device)
        make_deterministic(device, threads=critic.threads)
        self.policy_version = config.first_version
        self._num_steps, self._value_clip = config.run.num_steps, critic.value_clip
        keys = ("learning_rate", "num_epochs", "num_mini_batches")
        own = {key: value for key in keys if (value := getattr(critic, key)) is not None}
        self._trainer = config.trainer.model_copy(update=own)
        path = critic.model_path or model.path
        self._model = ValueModel(path, config=model, device=device, dtype=dtype)
        self._media = SampleMedia(self._model.family, MediaLibrary(config, model_path=path))
        self._flat = FlatParameters(self._model.module, config=self._trainer)
        self._sums: list[Tensor] = []
        self._num_loss_tokens = 0
        self._targets: list[tuple[NDArray[np.float64], NDArray[np.float64]]] = []
        self._batch = MiniBatchBuffer(self._trainer, seed=config.run.seed, ranks=SingleRank())
        self._report_progress: Callable[[], None] = lambda: None

    def accumulate(self, micro_batch: Sequence[SampleReady]) -> None:
        """Run forward and backward on a micro-batch; see `Critic`."""
        # All parts are packed before the first is trained, so that an invalid sample is found
        # before anything was added.
        for part, packed in [(part, self._pack(part)) for part in self._split(micro_batch)]:
            if not len(packed.old):
                continue
            self._targets.append((packed.old, packed.advantages + packed.old))
            if self._trainer.has_mini_batches:
                self._batch.add(part, packed.batch.num_loss_tokens)
            else:
                self._train(packed)

    def _split(self, micro_batch: Sequence[SampleReady]) -> Sequence[Sequence[SampleReady]]:
        max_cells = self._trainer.max_tokens_per_micro_batch
        return (
            [micro_batch]
            if self._model.shares_rows
            else cut_by_cells(micro_batch, max_cells=max_cells)
        )

    def on_progress(self, report_progress: Callable[[], None]) -> None:
        """Call this after each micro-batch that `step` runs; see `Critic`."""
        self._report_progress = report_progress

    def _pack(self, samples: Sequence[SampleReady]) -> _CriticBatch:
        samples = mask_truncated_samples(samples, algorithm=self._algorithm)
        batch = pack(samples, vocab_size=self._model.vocab_size, share_rows=self._model.shares_rows)
        advantages, old = (
            gather_loss_values(samples, field).astype(np.float64)
            for field in ("advantages", "values")
        )
        return _CriticBatch(self._media.add_to(batch, samples), advantages, old)

    def _train(self, packed: _CriticBatch) -> None:
        advantages, old = packed.advantages, packed.old
        values = self._model.token_values(packed.batch)
        old_values, returns = (
            torch.from_numpy(array).to(values) for array in (old, advantages + old)
        )
        losses = value_losses(
            values, old_values=old_values, returns=returns, value_clip=self._value_clip
        )
        losses.losses.sum().backward()
        self._sums.append(
            torch.stack([row.detach().double().sum() for row in (losses.losses, losses.clipped)])
        )
        self._num_loss_tokens += len(old)

    def step(self) -> ValueMetrics:
        """Normalise, clip, update; see `Critic`."""
        step, targets = self.policy_version, self._targets
        if not targets:
            raise RunFailed(
                f"train step {step} holds no loss token; do its samples have completions?"
            )
        learning_rate = compute_scheduled_learning_rate(
            self._trainer, step=step, num_steps=self._num_steps
        )
        try:
            updates = self._take_updates(learning_rate)
        finally:
            self._reset_step()
        self.policy_version += 1
        old, returns = (np.concatenate(arrays) for arrays in zip(*targets, strict=True))
        num_loss_tokens = sum(update.num_loss_tokens for update in updates)
        return ValueMetrics(
            value_loss=sum(update.loss for update in updates) / num_loss_tokens,
            value_clip_fraction=sum(update.clipped for update in updates) / num_loss_tokens,
            explained_variance=compute_explained_variance(old, returns=returns),
            value_mean=float(old.mean()),
            return_mean=float(returns.mean()),
            value_grad_norm=sum(update.grad_norm for update in updates) / len(updates),
            value_learning_rate=learning_rate,
        )

    def _take_updates(self, learning_rate: float) -> list[_Update]:
        """Take the optimizer steps of the train step. One that is not finite is skipped.

        Raises:
            StepNotFinite: No step was finite.
        """
        updates: list[_Update] = []
        failed: list[StepNotFinite] = []
        for number, micro_batches in enumerate(self._mini_batches()):
            for micro_batch in micro_batches:
                for packed in map(self._pack, self._split(micro_batch)):
                    if len(packed.old):
                        self._train(packed)
                self._report_progress()
            try:
                updates.append(self._update(learning_rate, number))
            except StepNotFinite as error:
                failed.append(error)
                self._flat.zero_gradients()
            self._sums, self._num_loss_tokens = [], 0
        if not updates:
            raise failed[-1]
        for skipped in failed:
            log.error("mini_batch.skipped", error=str(skipped))
        return updates

    def _mini_batches(self) -> Iterator[list[list[SampleReady]]]:
        """Yield the micro-batches of each optimizer step."""
        if not self._trainer.has_mini_batches:
            yield []
            return
        for _, micro_batches in self._batch.mini_batches(self.policy_version):
            yield micro_batches

    def _update(self, learning_rate: float, number: int) -> _Update:
        loss, clipped = torch.stack(self._sums).sum(dim=0).cpu().numpy().tolist()
        grad_norm = self._flat.normalise_gradients(self._num_loss_tokens)
        if not math.isfinite(loss) or not math.isfinite(grad_norm):
            name = f"train step {self.policy_version}" + (
                f", optimizer step {number}" if self._trainer.has_mini_batches else ""
            )
            raise StepNotFinite(
                f"{name}: the critic's loss and gradient must be finite, got "
                f"{loss / self._num_loss_tokens} and {grad_norm}; its weights are those "
                "before it; lower critic.learning_rate or inspect the step's rewards and values"
            )
        self._flat.update(
            learning_rate=learning_rate,
            gradient_scale=min(1.0, self._trainer.max_grad_norm / (grad_norm + 1e-6)),
        )
        return _Update(loss, clipped, self._num_loss_tokens, grad_norm)

    def _reset_step(self) -> None:
        self._sums, self._num_loss_tokens, self._targets = [], 0, []
        self._batch.clear()

    def skip_step(self) -> None:
        """Increment the version without an update; see `Critic`."""
        self._reset_step()
        self._flat.zero_gradients()
        self.policy_version += 1

    def score(self, samples: Sequence[TokenSequence]) -> list[NDArray[np.float32]]:
        """Give the value at every loss token; see `Critic`. Other samples change them by
        rounding only.
        """
        model = self._model

        def compute(batch: PackedBatch, rows: Sequence[TokenSequence]) -> Tensor:
            return model.token_values(self._media.add_to(batch, rows))

        return score_in_own_rows(
            samples,
            max_tokens=self._trainer.max_tokens_per_micro_batch,
            vocab_size=model.vocab_size,
            compute=compute,
        )

    def state(self) -> TrainerState:
        """Return weights in master precision and AdamW's moments; see `Critic`."""
        return TrainerState(policy_version=self.policy_version, tensors=self._flat.tensors())

    def load_state(self, state: StateSource) -> None:
        """Resume from a state; see `Critic`."""
        self._flat.load(state)
        self._reset_step()
        self.policy_version = state.policy_version


def compute_explained_variance(
    values: NDArray[np.float64], *, returns: NDArray[np.float64]
) -> float:
    """Return the share of the returns' variance that the values explain: 1 - var(returns - values)
    / var(returns).

    1 for a perfect critic, 0 for a constant, negative for a worse one. 0 where all returns are
    equal.

    Args:
        values: As recorded, of every loss token of a step.
        returns: The actual returns.
    """
    variance = float(returns.var())
    return 1.0 - float((returns - values).var()) / variance if variance > 0 else 0.0
