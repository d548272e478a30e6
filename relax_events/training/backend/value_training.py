"""Trains a value model: the value loss, metrics, and the values of samples.

All ranks of a critic get the same samples in the same order. Each copy of the model takes every
n-th micro-batch, so the ranks agree on what they run without a word.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relax_events.algorithms.objective import num_units, token_weights
from relax_events.algorithms.value_loss import value_losses
from relax_events.config import RunConfig, TrainerConfig
from relax_events.errors import PoisonSample, RunFailed, StepNotFinite
from relax_events.events.types import SampleReady
from relax_events.training.backend.learning_rate import compute_scheduled_learning_rate
from relax_events.training.backend.protocol import ValueMetrics
from relax_events.training.backend.scoring import score_in_halves, unpack_values
from relax_events.training.backend.step_training import Outputs, StepTraining, StepUpdates
from relax_events.training.batch.packing import PackedBatch, gather_loss_values, pack_in_passes
from relax_events.training.batch.paths import count_paths, split_paths
from relax_events.training.batch.row_layout import TokenSequence
from relax_events.training.batch.truncation import mask_excluded
from relax_events.training.ranks import Ranks, SingleRank

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
    """An optimizer step: sums over its loss tokens, the normaliser of its loss, and the norm of its
    gradient.
    """

    loss: float
    clipped: float
    num_loss_tokens: int
    num_units: int
    grad_norm: float


def critic_trainer(config: RunConfig) -> TrainerConfig:
    """Return the trainer's settings, replaced by the critic's where it has its own."""
    settings = {
        key: value for key in OWN_KEYS if (value := getattr(config.critic, key)) is not None
    }
    return config.trainer.model_copy(update=settings)


class ValueTraining(StepTraining[ValueBatch, _Update, ValueMetrics]):
    """The part of a `Critic` that does not depend on how the model is laid out."""

    def __init__(
        self, config: RunConfig, *, ranks: Ranks | None = None, dtype: torch.dtype | None = None
    ) -> None:
        """Load this rank's part of the critic of a run in its initial state, at the run's first
        version; collective where several ranks hold it.

        Args:
            config: The run.
            ranks: This process and its peers; by default it has none.
            dtype: Of the weights instead of `model.dtype`, for tests in float64.
        Raises:
            ConfigError: The model can't be loaded or trained by this backend.
        """
        self._config, ranks = config, ranks or SingleRank()
        super().__init__(
            critic_trainer(config),
            seed=config.run.seed,
            ranks=ranks,
            data_ranks=self._choose_data_ranks(ranks),
            # every rank has all samples, so none asks the others for theirs
            mini_batch_ranks=SingleRank(),
        )
        self.policy_version = config.first_version
        self._open_model(dtype or getattr(torch, config.model.dtype))

    def _reset_step(self) -> None:
        super()._reset_step()
        self._num_dealt = 0
        self._targets: list[tuple[NDArray[np.float64], NDArray[np.float64]]] = []

    def _clear_sums(self) -> None:
        self._sums: list[Tensor] = []
        self._num_loss_tokens = self._num_units = 0

    @abstractmethod
    def _train_all(self, value_batches: Iterable[ValueBatch]) -> None:
        """Run micro-batches forward and backward, and record each; collective where the model
        is.
        """

    @abstractmethod
    def _score_all(self, batches: Sequence[PackedBatch]) -> Iterator[NDArray[np.floating]]:
        """Yield the values of the loss tokens of each micro-batch of this copy of the model;
        collective where the model is.
        """

    @abstractmethod
    def _score_groups(self, paths: Sequence[TokenSequence]) -> list[list[int]]:
        """Return the indices of the samples of each micro-batch that is scored."""

    @abstractmethod
    def _pack_scored(self, samples: Sequence[TokenSequence]) -> PackedBatch:
        """Pack the samples of a micro-batch that is scored."""

    def _take_batch(self, samples: Sequence[SampleReady], packed: ValueBatch) -> None:
        self._targets.append((packed.old, packed.advantages + packed.old))
        if self._trainer.has_mini_batches:
            self._batch.add(samples, packed.batch.num_loss_tokens)
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
        self._num_units += num_units(
            torch.from_numpy(packed.batch.num_loss_tokens),
            aggregation=self._config.algorithm.aggregation,
        )
        return turn == self._data_ranks.rank

    def _pack(self, samples: Sequence[SampleReady]) -> ValueBatch:
        samples = mask_excluded(samples, algorithm=self._config.algorithm)
        batch = pack_in_passes(
            samples,
            max_cells=self._max_cells,
            vocab_size=self._model.vocab_size,
            share_rows=self._model.shares_rows,
        )
        advantages, old = (
            gather_loss_values(samples, field).astype(np.float64)
            for field in ("advantages", "values")
        )
        return ValueBatch(self._media.add_to(batch, samples), advantages, old)

    def _compute_loss(
        self, packed: ValueBatch, outputs: Outputs
    ) -> tuple[Tensor, Callable[[], None]]:
        """Return the loss of a micro-batch, not normalised, from the values of its loss tokens, and
        what adds its sums to the step's.
        """
        (values,), advantages, old = outputs, packed.advantages, packed.old
        old_values, returns = (
            torch.from_numpy(array).to(values) for array in (old, advantages + old)
        )
        losses = value_losses(
            values,
            old_values=old_values,
            returns=returns,
            value_clip=self._config.critic.value_clip,
        )
        algorithm = self._config.algorithm
        weighted = losses.losses * token_weights(
            torch.from_numpy(packed.batch.num_loss_tokens).to(values.device),
            aggregation=algorithm.aggregation,
            length_normaliser=algorithm.length_normaliser
            or self._config.engine.sampling.max_new_tokens,
            dtype=values.dtype,
        )
        sums = torch.stack([row.detach().double().sum() for row in (weighted, losses.clipped)])
        return weighted.sum(), lambda: self._sums.append(sums)

    def _prepare_step(self) -> float:
        step = self.policy_version
        if not self._targets:
            raise RunFailed(
                f"train step {step} holds no loss token; do its samples have completions?"
            )
        return compute_scheduled_learning_rate(
            self._trainer, step=step, num_steps=self._config.run.num_steps
        )

    def _build_metrics(self, taken: StepUpdates[_Update], learning_rate: float) -> ValueMetrics:
        updates = taken.updates
        old, returns = (np.concatenate(arrays) for arrays in zip(*self._targets, strict=True))
        num_loss_tokens = sum(update.num_loss_tokens for update in updates)
        return ValueMetrics(
            value_loss=sum(update.loss for update in updates)
            / sum(update.num_units for update in updates),
            value_clip_fraction=sum(update.clipped for update in updates) / num_loss_tokens,
            explained_variance=compute_explained_variance(old, returns=returns),
            value_mean=float(old.mean()),
            return_mean=float(returns.mean()),
            value_grad_norm=sum(update.grad_norm for update in updates) / len(updates),
            value_learning_rate=learning_rate,
        )

    def _mini_batches(self) -> Iterator[tuple[int, Iterable[ValueBatch]]]:
        """Yield this copy's micro-batches of each optimizer step, and its pass."""
        if not self._trainer.has_mini_batches:
            yield 0, self._deferred
            return
        for epoch, micro_batches in self._batch.mini_batches(self.policy_version):
            yield epoch, self._deal(micro_batches)

    def _train_mini_batch(self, mini_batch: Iterable[ValueBatch]) -> None:
        self._train_all(mini_batch)

    def _deal(self, micro_batches: Iterable[Sequence[SampleReady]]) -> Iterator[ValueBatch]:
        """Yield the micro-batches of an optimizer step that this copy runs."""
        for micro_batch in micro_batches:
            for packed in map(self._pack, self._split(micro_batch)):
                if len(packed.old) and self._takes(packed):
                    yield packed

    def _update(self, epoch: int, learning_rate: float, *, name: str, may_stop: bool) -> _Update:
        del epoch, may_stop  # no bound on a divergence ends the critic's step
        sums = torch.stack(self._sums).sum(dim=0).cpu().numpy() if self._sums else np.zeros(2)
        rows = self._data_ranks.all_gather(np.append(sums, self._num_loss_tokens))
        if (rows[:, 2] != self._num_loss_tokens).any():
            raise RunFailed(
                f"train step {self.policy_version}: the critic's ranks took samples of "
                f"{sorted({int(number) for number in rows[:, 2]})} loss tokens, and must take the "
                "same; can all of them read the samples' media?"
            )
        loss, clipped = rows[:, :2].sum(axis=0).tolist()
        grad_norm = self._reduce_gradients(self._num_units)
        if not math.isfinite(loss) or not math.isfinite(grad_norm):
            raise StepNotFinite(
                f"{name}: the critic's loss and gradient must be finite, got "
                f"{loss / self._num_units} and {grad_norm}; its weights are those "
                "before it; lower critic.learning_rate or inspect the step's rewards and values"
            )
        self._apply_gradients(grad_norm, learning_rate)
        return _Update(loss, clipped, self._num_loss_tokens, self._num_units, grad_norm)

    def score(self, samples: Sequence[TokenSequence]) -> list[NDArray[np.float32]]:
        """Give the value at every loss token; see `Critic`. Other samples change them by
        rounding only.
        """
        paths = split_paths(samples)
        groups, scores = self._score_groups(paths), dict[int, NDArray[np.float32]]()
        if self._ranks.size > 1:  # which wait for each other in a pass
            scores = self._score_paths(paths, groups)
        else:
            for _, part in score_in_halves(groups, lambda one: self._score_paths(paths, [one])):
                scores |= part
        ordered = iter([scores[index] for index in range(len(paths))])
        counts = count_paths(samples).tolist()
        return [np.concatenate(list(islice(ordered, number))) for number in counts]

    def _score_paths(
        self, paths: Sequence[TokenSequence], groups: Sequence[Sequence[int]]
    ) -> dict[int, NDArray[np.float32]]:
        """Return the values of the paths of micro-batches by index; collective."""
        copies = self._data_ranks
        with self._guard("scoring"):
            batches = self._pack_mine([[paths[index] for index in group] for group in groups])
            values_of_rank = list(self._score_all(batches))
            rows = copies.all_gather_bytes(b"".join(values.tobytes() for values in values_of_rank))
        scores: dict[int, NDArray[np.float32]] = {}
        for copy, row in enumerate(rows):
            indices = [index for group in groups[copy :: copies.size] for index in group]
            copy_paths = [paths[index] for index in indices]
            copy_values = unpack_values(np.frombuffer(row, np.float32), copy_paths)
            scores |= zip(indices, copy_values, strict=True)
        return scores

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
