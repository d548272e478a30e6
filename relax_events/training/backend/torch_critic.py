"""Implements the critic of the backend `torch`: a value model and its optimizer, on one device or
sharded over several ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from relax_events.config import RunConfig
from relax_events.errors import ConfigError
from relax_events.media.library import MediaLibrary
from relax_events.models.causal_lm import choose_device
from relax_events.training.backend.determinism import make_deterministic
from relax_events.training.backend.flat_parameters import FlatParameters
from relax_events.training.backend.protocol import ValueMetrics
from relax_events.training.backend.recomputation import recompute_layers
from relax_events.training.backend.scoring import group_by_padded_length, pack_in_own_rows
from relax_events.training.backend.sharded_parameters import ShardedParameters, shard_model
from relax_events.training.backend.state import StateSource, TrainerState
from relax_events.training.backend.value_model import ValueModel
from relax_events.training.backend.value_training import ValueBatch, ValueTraining
from relax_events.training.batch.packing import PackedBatch
from relax_events.training.batch.row_layout import TokenSequence
from relax_events.training.batch.sample_intake import SampleMedia
from relax_events.training.ranks import Ranks, SingleRank


class TorchCritic(ValueTraining):
    """Implements `Critic`. On the CPU the same micro-batches in the same order give the same
    bits. Its score gives each sample a row of its own among rows of one padded length.
    """

    _model: ValueModel
    _parameters: FlatParameters | ShardedParameters

    def __init__(
        self, config: RunConfig, *, ranks: Ranks | None = None, dtype: torch.dtype | None = None
    ) -> None:
        """Load the critic of a run in its initial state; collective where it is sharded.

        Args:
            config: The run.
            ranks: Those that shard the model (FSDP2); by default this process alone holds it.
            dtype: Of the weights instead of `model.dtype`, for tests in float64.
        Raises:
            ConfigError: The model can't be loaded.
        """
        ranks = ranks or SingleRank()
        super().__init__(config, ranks=ranks)
        self.waits_for_step = self._is_sharded = ranks.size > 1
        self._device = choose_device(config.model.device, local_rank=ranks.local_rank)
        make_deterministic(self._device, threads=config.critic.threads)
        path = config.critic.model_path or config.model.path
        self._model = ValueModel(
            path, config=config.model, device=self._device, dtype=dtype, prepare=self._prepare_model
        )
        self._media = SampleMedia(self._model.family, MediaLibrary(config, model_path=path))
        self._parameters = (
            ShardedParameters(self._model.module, config=self._trainer, ranks=ranks)
            if self._is_sharded
            else FlatParameters(self._model.module, config=self._trainer)
        )

    def _prepare_model(self, module: nn.Module, layers: object) -> None:
        """Set what the model recomputes, and shard it."""
        recomputed = self._trainer.activation_checkpointing
        if recomputed == "none" and not self._is_sharded:
            return
        if not isinstance(layers, nn.ModuleList):
            raise ConfigError(
                "trainer.sharding and trainer.activation_checkpointing need a list of decoder "
                "layers, and the critic's model has none; set both to 'none'"
            )
        recompute_layers(layers, recomputed)
        if self._is_sharded:
            with self._guard("sharding the critic"):
                shard_model(module, layers=layers, device=self._device)

    def _guard(self, what: str) -> AbstractContextManager[None]:
        return self._ranks.guard(what) if self._is_sharded else nullcontext()

    def _train_all(self, value_batches: Iterable[ValueBatch]) -> None:
        """Run micro-batches forward and backward; see `ValueTraining`."""
        num_idle = 0
        if self._is_sharded:
            value_batches = list(value_batches)
            counts = self._ranks.all_gather(np.array([len(value_batches)]))
            num_idle = int(counts.max()) - len(value_batches)
        for packed in value_batches:
            self._compute_loss(packed, self._model.token_values(packed.batch)).backward()
            self._report_progress()
        for _ in range(num_idle):
            self._model.idle_output().backward()
            self._report_progress()

    def step(self) -> ValueMetrics:
        """Normalise, clip, update; see `Critic`."""
        with self._guard("a forward or backward pass"):
            return super().step()

    def score(self, samples: Sequence[TokenSequence]) -> list[NDArray[np.float32]]:
        """Give the value at every loss token; see `Critic`."""
        with self._guard("a forward pass"):
            return super().score(samples)

    def _score_groups(self, paths: Sequence[TokenSequence]) -> list[list[int]]:
        return list(
            group_by_padded_length(paths, max_tokens=self._trainer.max_tokens_per_micro_batch)
        )

    def _pack_scored(self, samples: Sequence[TokenSequence]) -> PackedBatch:
        batch = pack_in_own_rows(samples, vocab_size=self._model.vocab_size)
        return self._media.add_to(batch, samples)

    def _score_all(
        self, batches: Iterable[PackedBatch], *, num_rounds: int
    ) -> Iterator[NDArray[np.float32]]:
        """Yield the values of micro-batches; see `ValueTraining`."""
        number = 0
        with torch.no_grad():
            for batch in batches:
                values: NDArray[np.float32] = self._model.token_values(batch).float().cpu().numpy()
                yield values
                number += 1
            for _ in range(num_rounds - number if self._is_sharded else 0):
                self._model.idle_output()

    def state(self) -> TrainerState:
        """Return weights in master precision and AdamW's moments; see `Critic`."""
        return self._parameters.state(self.policy_version)

    def load_state(self, state: StateSource) -> None:
        """Resume from a state; see `Critic`."""
        self._parameters.load(state)
        self._reset_step()
        self.policy_version = state.policy_version
