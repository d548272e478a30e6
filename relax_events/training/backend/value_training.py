"""Trains a value model in steps, for every critic that runs packed micro-batches: what is trained
now and what waits for the step's end, mini-batches, updates, metrics, and the values of samples.

All ranks of a critic get the same samples in the same order. Each copy of the model takes every
n-th micro-batch, so the ranks agree on what they run without a word.

A backend adds the model: how micro-batches run forward and backward, and the parameters.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import numpy as np
import structlog
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from relax_events.algorithms.value_loss import value_losses
from relax_events.config import RunConfig, TrainerConfig
from relax_events.errors import PoisonSample, RunFailed, StepNotFinite
from relax_events.events.types import SampleReady
from relax_events.training.backend.learning_rate import compute_scheduled_learning_rate
from relax_events.training.backend.parameter_store import ParameterStore
from relax_events.training.backend.protocol import ValueMetrics
from relax_events.training.backend.scoring import unpack_values
from relax_events.training.batch.loss_batch import mask_truncated_samples
from relax_events.training.batch.mini_batches import MiniBatchBuffer
from relax_events.training.batch.packing import PackedBatch, cut_by_cells, gather_loss_values, pack
from relax_events.training.batch.paths import count_paths, split_paths
from relax_events.training.batch.row_layout import TokenSequence
from relax_events.training.batch.sample_intake import SampleMedia
from relax_events.training.ranks import GatheringRanks, Ranks, SingleRank

log = structlog.get_logger()
OWN_KEYS = ("learning_rate", "num_epochs", "num_mini_batches")
"""Settings of `trainer` that the section `critic` may replace."""


@dataclass(frozen=True, slots=True)
class ValueBatch:
    """A packed micro-batch; `old` are the recorded values of its loss tokens."""

    batch: PackedBatch
    advantages: NDArray[np.float64]
    old: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _Update:
    """An optimizer step: sums over its loss tokens, and the norm of its gradient."""

    loss: float
    clipped: float
    num_loss_tokens: int
    grad_norm: float


class PackedValueModel(Protocol):
    """What packing needs to know of a model."""

    vocab_size: int
    shares_rows: bool


def critic_trainer(config: RunConfig) -> TrainerConfig:
    """Return the trainer's settings, replaced by the critic's where it has its own."""
    settings = {
        key: value for key in OWN_KEYS if (value := getattr(config.critic, key)) is not None
    }
    return config.trainer.model_copy(update=settings)


class ValueTraining(ABC):
    """The part of a `Critic` that does not depend on how the model is laid out."""

    _model: PackedValueModel
    _media: SampleMedia
    _parameters: ParameterStore
    waits_for_step: bool
    """Whether all micro-batches run in `step`, because forward passes are collective."""

    def __init__(
        self, config: RunConfig, *, ranks: Ranks, data_ranks: GatheringRanks | None = None
    ) -> None:
        """Start empty, at the run's first version.

        Args:
            config: The run.
            ranks: This process and its peers.
            data_ranks: The copies of the model; by default each rank is one.
        """
        self.policy_version = config.first_version
        self._algorithm, self._value_clip = config.algorithm, config.critic.value_clip
        self._num_steps = config.run.num_steps
        self._trainer = critic_trainer(config)
        self._ranks = ranks
        self._data_ranks: GatheringRanks = data_ranks or ranks
        # every rank has all samples, so none asks the others for theirs
        self._batch = MiniBatchBuffer(self._trainer, seed=config.run.seed, ranks=SingleRank())
        self._report_progress: Callable[[], None] = lambda: None
        self._reset_step()

    def _reset_step(self) -> None:
        self._sums: list[Tensor] = []
        self._num_loss_tokens = self._num_dealt = 0
        self._deferred: list[ValueBatch] = []
        self._targets: list[tuple[NDArray[np.float64], NDArray[np.float64]]] = []
        self._batch.clear()

    @abstractmethod
    def _train_all(self, value_batches: Iterable[ValueBatch]) -> None:
        """Run micro-batches forward and backward, and record each; collective where the model
        is.
        """

    @abstractmethod
    def _score_all(
        self, batches: Iterable[PackedBatch], *, num_rounds: int
    ) -> Iterator[NDArray[np.float32]]:
        """Yield the values of the loss tokens of each micro-batch; collective where the model is.

        Args:
            batches: Of this copy of the model, in order.
            num_rounds: Micro-batches that some copy has, at least as many as this one.
        """

    @abstractmethod
    def _score_groups(self, paths: Sequence[TokenSequence]) -> list[list[int]]:
        """Return the indices of the samples of each micro-batch that is scored."""

    @abstractmethod
    def _pack_scored(self, samples: Sequence[TokenSequence]) -> PackedBatch:
        """Pack the samples of a micro-batch that is scored."""

    def accumulate(self, micro_batch: Sequence[SampleReady]) -> None:
        """Run forward and backward on a micro-batch; see `Critic`. Where forward passes are
        collective, `step` runs it.
        """
        # All parts are packed before the first is trained, so that an invalid sample is found
        # before anything was added.
        for part, packed in [(part, self._pack(part)) for part in self._split(micro_batch)]:
            if not len(packed.old):
                continue
            self._targets.append((packed.old, packed.advantages + packed.old))
            if self._trainer.has_mini_batches:
                self._batch.add(part, packed.batch.num_loss_tokens)
            elif self._takes(packed):
                if self.waits_for_step:
                    self._deferred.append(packed)
                else:
                    self._train_all([packed])

    def _takes(self, packed: ValueBatch) -> bool:
        """Count a micro-batch, and return whether it is this copy's turn to run it."""
        turn = self._num_dealt % self._data_ranks.size
        self._num_dealt += 1
        self._num_loss_tokens += len(packed.old)
        return turn == self._data_ranks.rank

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

    def _pack(self, samples: Sequence[SampleReady]) -> ValueBatch:
        samples = mask_truncated_samples(samples, algorithm=self._algorithm)
        batch = pack(samples, vocab_size=self._model.vocab_size, share_rows=self._model.shares_rows)
        advantages, old = (
            gather_loss_values(samples, field).astype(np.float64)
            for field in ("advantages", "values")
        )
        return ValueBatch(self._media.add_to(batch, samples), advantages, old)

    def _compute_loss(self, packed: ValueBatch, values: Float[Tensor, " loss_tokens"]) -> Tensor:
        """Return the loss of a micro-batch, not normalised, and add its sums to the step's."""
        advantages, old = packed.advantages, packed.old
        old_values, returns = (
            torch.from_numpy(array).to(values) for array in (old, advantages + old)
        )
        losses = value_losses(
            values, old_values=old_values, returns=returns, value_clip=self._value_clip
        )
        self._sums.append(
            torch.stack([row.detach().double().sum() for row in (losses.losses, losses.clipped)])
        )
        return losses.losses.sum()

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
        """Take the optimizer steps of the train step. A step that is not finite is skipped.

        Raises:
            StepNotFinite: No step was finite.
        """
        updates: list[_Update] = []
        failed: list[StepNotFinite] = []
        for number, value_batches in enumerate(self._mini_batches()):
            self._train_all(value_batches)
            try:
                updates.append(self._update(learning_rate, number))
            except StepNotFinite as error:
                failed.append(error)
                self._parameters.zero_gradients()
            self._sums, self._num_loss_tokens = [], 0
        if not updates:
            raise failed[-1]
        for skipped in failed:
            log.error("mini_batch.skipped", error=str(skipped))
        return updates

    def _mini_batches(self) -> Iterator[Iterable[ValueBatch]]:
        """Yield this copy's micro-batches of each optimizer step."""
        if not self._trainer.has_mini_batches:
            yield self._deferred
            return
        for _, micro_batches in self._batch.mini_batches(self.policy_version):
            yield self._deal(micro_batches)

    def _deal(self, micro_batches: Iterable[Sequence[SampleReady]]) -> Iterator[ValueBatch]:
        """Yield the micro-batches of an optimizer step that this copy runs."""
        for micro_batch in micro_batches:
            for packed in map(self._pack, self._split(micro_batch)):
                if len(packed.old) and self._takes(packed):
                    yield packed

    def _update(self, learning_rate: float, number: int) -> _Update:
        sums = torch.stack(self._sums).sum(dim=0).cpu().numpy() if self._sums else np.zeros(2)
        rows = self._data_ranks.all_gather(np.append(sums, self._num_loss_tokens))
        if (rows[:, 2] != self._num_loss_tokens).any():
            raise RunFailed(
                f"train step {self.policy_version}: the critic's ranks took samples of "
                f"{sorted({int(number) for number in rows[:, 2]})} loss tokens, and must take the "
                "same; can all of them read the samples' media?"
            )
        loss, clipped = rows[:, :2].sum(axis=0).tolist()
        self._parameters.reduce_gradients(self._ranks)
        grad_norm = self._parameters.normalise_gradients(self._num_loss_tokens)
        if not math.isfinite(loss) or not math.isfinite(grad_norm):
            name = f"train step {self.policy_version}" + (
                f", optimizer step {number}" if self._trainer.has_mini_batches else ""
            )
            raise StepNotFinite(
                f"{name}: the critic's loss and gradient must be finite, got "
                f"{loss / self._num_loss_tokens} and {grad_norm}; its weights are those "
                "before it; lower critic.learning_rate or inspect the step's rewards and values"
            )
        self._parameters.update(
            learning_rate=learning_rate,
            gradient_scale=min(1.0, self._trainer.max_grad_norm / (grad_norm + 1e-6)),
        )
        return _Update(loss, clipped, self._num_loss_tokens, grad_norm)

    def skip_step(self) -> None:
        """Increment the version without an update; see `Critic`."""
        self._reset_step()
        self._parameters.zero_gradients()
        self.policy_version += 1

    def score(self, samples: Sequence[TokenSequence]) -> list[NDArray[np.float32]]:
        """Give the value at every loss token; see `Critic`. Other samples change them by
        rounding only.
        """
        paths = split_paths(samples)
        groups, copies = self._score_groups(paths), self._data_ranks
        batches = self._pack_mine([[paths[index] for index in group] for group in groups])
        values_of_rank = list(self._score_all(batches, num_rounds=-(-len(groups) // copies.size)))
        rows = copies.all_gather_bytes(b"".join(values.tobytes() for values in values_of_rank))
        scores: dict[int, NDArray[np.float32]] = {}
        for copy, row in enumerate(rows):
            indices = [index for group in groups[copy :: copies.size] for index in group]
            copy_paths = [paths[index] for index in indices]
            copy_values = unpack_values(np.frombuffer(row, np.float32), copy_paths)
            scores |= zip(indices, copy_values, strict=True)
        ordered = iter([scores[index] for index in range(len(paths))])
        counts = count_paths(samples).tolist()
        return [np.concatenate(list(islice(ordered, number))) for number in counts]

    def _pack_mine(self, groups: list[list[TokenSequence]]) -> list[PackedBatch]:
        """Pack the micro-batches that this copy scores; collective.

        Raises:
            PoisonSample: A copy can't score one of its samples; on all, before any of them runs.
        """
        copies, failed = self._data_ranks, None
        batches: list[PackedBatch] = []
        try:
            batches = [self._pack_scored(group) for group in groups[copies.rank :: copies.size]]
        except PoisonSample as error:
            failed = error
        problem = "" if failed is None else str(failed)
        texts = [text.decode() for text in copies.all_gather_bytes(problem.encode()) if text]
        if texts:
            raise failed or PoisonSample(texts[0])
        return batches


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
