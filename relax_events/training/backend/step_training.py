"""Trains a model in steps, whatever it learns: micro-batches that are trained now or kept for the
step's end, one optimizer step or several, and none with a loss or gradient that is not finite.

    PolicyTraining      the policy's objective; each data-parallel rank has its own samples
    ValueTraining       the critic's value loss; every rank has all samples and takes its share

A backend adds the model: how micro-batches run forward and backward, and the parameters
(ADR 56).
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import structlog
import torch
from torch import Tensor

from relax_events.config import TrainerConfig
from relax_events.errors import RunFailed, StepNotFinite
from relax_events.events.types import SampleReady
from relax_events.training.backend.parameter_store import ParameterStore
from relax_events.training.backend.state import StateSource, TrainerState
from relax_events.training.batch.mini_batches import MiniBatchBuffer
from relax_events.training.batch.packing import PackedBatch, cut_by_cells
from relax_events.training.batch.sample_intake import SampleMedia
from relax_events.training.ranks import GatheringRanks, Ranks

log = structlog.get_logger()


class PackedModel(Protocol):
    """What packing needs to know of a model."""

    vocab_size: int
    shares_rows: bool


class TrainingBatch(Protocol):
    """A packed micro-batch with what its loss needs."""

    @property
    def batch(self) -> PackedBatch:
        """The micro-batch."""


Batch = TypeVar("Batch", bound=TrainingBatch)
Update = TypeVar("Update")
Outputs = tuple[Tensor, ...]
"""What a pass of the model computes at its loss tokens."""
LostBatch = tuple[Outputs, Callable[[], None]]
"""The outputs of a micro-batch whose loss has run backward to them, and what records it."""
Metrics = TypeVar("Metrics")


@dataclass(frozen=True, slots=True)
class ModelPass(Generic[Batch]):
    """A pass of the model: a micro-batch, or a part of one that is larger than a pass may be.

    Attributes:
        whole: The micro-batch.
        batch: What the model runs.
        tokens: Of the loss tokens of the micro-batch.
        paths: Of the paths of the micro-batch.
        is_last: Whether it is the micro-batch's last one.
    """

    whole: Batch
    batch: PackedBatch
    tokens: slice
    paths: slice
    is_last: bool


def list_passes(batches: Iterable[Batch]) -> Iterator[ModelPass[Batch]]:
    """Yield the passes of micro-batches that have loss tokens. A part without one has no gradient,
    and does not run.
    """
    for whole in batches:
        num_tokens, token, path = len(whole.batch.targets), 0, 0
        for part in whole.batch.parts or (whole.batch,):
            tokens = slice(token, token + len(part.targets))
            paths = slice(path, path + len(part.num_path_tokens))
            token, path = tokens.stop, paths.stop
            if len(part.targets):
                yield ModelPass(whole, part, tokens, paths, is_last=token == num_tokens)


def join_outputs(outputs: Sequence[Outputs]) -> Outputs:
    """Concatenate what the passes of a micro-batch computed at its loss tokens, as leaves that a
    loss of all of them has gradients at.
    """
    return tuple(
        torch.cat(values).detach().requires_grad_(values[0].is_floating_point())
        for values in zip(*outputs, strict=True)
    )


def multiply_gradients(outputs: Outputs, leaves: Outputs, tokens: slice) -> Tensor:
    """Return the loss of a pass that runs backward from the gradients that the loss of its whole
    micro-batch has at its outputs: so the passes add up to the gradient of one, whatever couples
    their tokens.

    Args:
        outputs: Of the pass, computed again with gradient.
        leaves: From `join_outputs`; the loss has run backward.
        tokens: Those of the pass.
    """
    products = [
        (output * leaf.grad[tokens]).sum()
        for output, leaf in zip(outputs, leaves, strict=True)
        if output.requires_grad and leaf.grad is not None
    ]
    return torch.stack(products).sum()


@dataclass(frozen=True, slots=True)
class StepUpdates(Generic[Update]):
    """The completed optimizer steps of a train step.

    Attributes:
        updates: At least one, in order.
        num_not_finite: Steps that were skipped because loss or gradient was not finite.
        is_stopped: Whether the remaining steps were skipped because of `trainer.max_kl`.
    """

    updates: list[Update]
    num_not_finite: int
    is_stopped: bool


class StepTraining(ABC, Generic[Batch, Update, Metrics]):
    """The part of a `TrainerBackend` or `Critic` that depends neither on what is learned nor on how
    the model is laid out.
    """

    _model: PackedModel
    _media: SampleMedia
    _parameters: ParameterStore
    waits_for_step: bool
    """Whether all micro-batches run in `step`, because forward passes are collective."""
    max_cells: int
    """Budget of a pass of the model, in tokens; see `pack_in_passes`."""
    cuts_samples = False
    """Whether the paths of a micro-batch above this budget run in several passes."""

    def __init__(
        self,
        trainer: TrainerConfig,
        *,
        seed: int,
        ranks: Ranks,
        data_ranks: GatheringRanks,
        mini_batch_ranks: GatheringRanks,
        whole_prompt_groups: bool = False,
    ) -> None:
        """Start empty, at version 0.

        Args:
            trainer: Settings of this training.
            seed: Of the run.
            ranks: This process and its peers.
            data_ranks: Those that run different micro-batches.
            mini_batch_ranks: Those that have different samples of a mini-batch.
            whole_prompt_groups: Whether all samples of a prompt group must be in one micro-batch.
        """
        self.policy_version = 0
        self._trainer, self._ranks, self._data_ranks = trainer, ranks, data_ranks
        self._whole_prompt_groups = whole_prompt_groups
        self._deferred: list[Batch] = []
        self._batch = MiniBatchBuffer(
            trainer,
            seed=seed,
            ranks=mini_batch_ranks,
            whole_prompt_groups=whole_prompt_groups,
        )
        self.max_cells = trainer.max_tokens_per_micro_batch
        self._report_progress: Callable[[], None] = lambda: None
        self._reset_step()

    @staticmethod
    def _choose_data_ranks(ranks: Ranks) -> GatheringRanks:
        """Return those that run different micro-batches; by default each rank has a whole model."""
        return ranks

    @abstractmethod
    def _open_model(self, dtype: torch.dtype) -> None:
        """Load the model at its initial weights, with its media and parameters; collective where
        several ranks hold it.

        Args:
            dtype: Of the weights.
        """

    @abstractmethod
    def _pack(self, samples: Sequence[SampleReady]) -> Batch:
        """Pack a micro-batch."""

    @abstractmethod
    def _take_batch(self, samples: Sequence[SampleReady], packed: Batch) -> None:
        """Train a micro-batch that has loss tokens, or keep it for the step's end."""

    @abstractmethod
    def _prepare_step(self) -> float:
        """Compute what needs the whole step, and return its learning rate; may be collective."""

    @abstractmethod
    def _mini_batches(self) -> Iterator[tuple[int, Iterable[Batch]]]:
        """Yield this rank's micro-batches of each optimizer step, and its pass. The start may be
        collective.
        """

    @abstractmethod
    def _train_mini_batch(self, mini_batch: Iterable[Batch]) -> None:
        """Train the micro-batches of an optimizer step that were not trained before; collective."""

    @abstractmethod
    def _update(
        self, epoch: int, learning_rate: float, *, name: str, may_stop: bool
    ) -> Update | None:
        """Take an optimizer step with the accumulated gradients; None where the step is to stop
        instead.

        Args:
            epoch: Pass of the optimizer step.
            learning_rate: Of the step.
            name: Of the optimizer step, for errors.
            may_stop: Whether one was completed before it.
        Raises:
            StepNotFinite: Loss or gradient is not finite, on all ranks.
        """

    @abstractmethod
    def _build_metrics(self, taken: StepUpdates[Update], learning_rate: float) -> Metrics:
        """Return the metrics of a train step."""

    @abstractmethod
    def _clear_sums(self) -> None:
        """Forget the sums of an optimizer step."""

    def accumulate(self, micro_batch: Sequence[SampleReady]) -> None:
        """Run forward and backward on a micro-batch; see `TrainerBackend` and `Critic`. If it can't
        run alone, or statistics of the whole step are needed first, `step` runs it.
        """
        if not micro_batch:
            return
        # All parts are packed before the first is trained, so that an invalid sample is found
        # before anything was added.
        for part, packed in [(part, self._pack(part)) for part in self._split(micro_batch)]:
            if len(packed.batch.targets):
                self._take_batch(part, packed)

    def check(self, micro_batch: Sequence[SampleReady]) -> None:
        """Pack a micro-batch, and drop it; see `TrainerBackend`."""
        for part in self._split(micro_batch) if micro_batch else ():
            self._pack(part)

    def _split(self, micro_batch: Sequence[SampleReady]) -> Sequence[Sequence[SampleReady]]:
        """Split a micro-batch by its padded size where each sample has its own row."""
        if self._model.shares_rows:
            return [micro_batch]
        max_cells, whole = self._trainer.max_tokens_per_micro_batch, self._whole_prompt_groups
        return cut_by_cells(micro_batch, max_cells=max_cells, whole_prompt_groups=whole)

    @property
    def _max_cells(self) -> int:
        return self.max_cells if self.cuts_samples else sys.maxsize

    def on_progress(self, report_progress: Callable[[], None]) -> None:
        """Call this after each pass that `step` runs; see `TrainerBackend`."""
        self._report_progress = report_progress

    def step(self) -> Metrics:
        """Reduce, normalise, clip, update; see `TrainerBackend` and `Critic`."""
        try:
            with self._guard("a train step"):
                learning_rate = self._prepare_step()
                metrics = self._build_metrics(self._take_updates(learning_rate), learning_rate)
        except RunFailed:
            self.discard()
            raise
        self._reset_step()
        self.policy_version += 1
        return metrics

    def _guard(self, what: str) -> AbstractContextManager[None]:
        """Return the context for passes and collectives of this training's own."""
        return self._ranks.guard(what)

    def _take_updates(self, learning_rate: float) -> StepUpdates[Update]:
        """Take the optimizer steps of the train step. One that is not finite is skipped.

        Raises:
            StepNotFinite: No step was finite.
        """
        updates: list[Update] = []
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
            self._clear_sums()
            if is_stopped:
                break
        if not updates:
            raise failed[-1]
        for skipped in failed:
            log.error("mini_batch.skipped", error=str(skipped))
        return StepUpdates(updates, len(failed), is_stopped)

    def _step_name(self, number: int) -> str:
        """Return the name of an optimizer step for errors."""
        return f"train step {self.policy_version}" + (
            f", optimizer step {number}" if self._trainer.has_mini_batches else ""
        )

    def _reduce_gradients(self, normaliser: float) -> float:
        """Sum the gradients over ranks, divide them, and return their norm."""
        self._parameters.reduce_gradients(self._ranks)
        return self._parameters.normalise_gradients(normaliser)

    def _apply_gradients(self, grad_norm: float, learning_rate: float) -> None:
        """Clip the gradients, and take one optimizer step."""
        self._parameters.update(
            learning_rate=learning_rate,
            gradient_scale=min(1.0, self._trainer.max_grad_norm / (grad_norm + 1e-6)),
        )

    def discard(self) -> None:
        """Discard the accumulated gradients; see `TrainerBackend`."""
        self._reset_step()
        self._parameters.zero_gradients()

    def _reset_step(self) -> None:
        self._clear_sums()
        self._deferred = []
        self._batch.clear()

    def skip_step(self) -> None:
        """Count up without an update; see `TrainerBackend` and `Critic`."""
        self.discard()
        self.policy_version += 1

    def state(self) -> TrainerState:
        """Show weights in master precision and the optimizer's state; see `TrainerBackend` and
        `Critic`.
        """
        return self._parameters.state(self.policy_version)

    def load_state(self, state: StateSource) -> None:
        """Resume from a state; see `TrainerBackend` and `Critic`."""
        self._load_parameters(state)

    def _load_parameters(self, state: StateSource, *, without: Collection[str] = ()) -> None:
        with self._guard("loading a state"):
            self._parameters.load(state, without=without)
        self._reset_step()
        self.policy_version = state.policy_version
