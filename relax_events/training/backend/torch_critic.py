"""Implements the critic of the backend `torch`: a value model and its optimizer, on one device or
sharded over several ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from relax_events.media.library import MediaLibrary
from relax_events.models.causal_lm import open_device
from relax_events.training.backend.determinism import make_deterministic
from relax_events.training.backend.flat_parameters import FlatParameters
from relax_events.training.backend.scoring import group_by_padded_length, pack_in_own_rows
from relax_events.training.backend.sharded_parameters import ShardedParameters
from relax_events.training.backend.torch_layout import ModelCalls, TorchLayout
from relax_events.training.backend.value_model import ValueModel
from relax_events.training.backend.value_training import ValueBatch, ValueTraining
from relax_events.training.batch.packing import PackedBatch
from relax_events.training.batch.row_layout import TokenSequence
from relax_events.training.batch.sample_intake import SampleMedia


class TorchCritic(ValueTraining):
    """Implements `Critic`. On the CPU the same micro-batches in the same order give the same
    bits. Its score gives each sample a row of its own among rows of one padded length.
    """

    _model: ValueModel
    _parameters: FlatParameters | ShardedParameters
    cuts_samples = True

    def _open_model(self, dtype: torch.dtype) -> None:
        """Load the value model, sharded over several ranks (FSDP2); see `StepTraining`."""
        config, ranks = self._config, self._ranks
        self.waits_for_step = ranks.size > 1
        device = open_device(config.model.device, local_rank=ranks.local_rank)
        self._layout = TorchLayout(
            self._trainer, ranks=ranks, device=device, is_sharded=self.waits_for_step
        )
        make_deterministic(device, threads=config.critic.threads)
        path = config.critic.model_path or config.model.path
        self._model = ValueModel(
            path,
            config=config.model,
            device=device,
            dtype=dtype,
            prepare=lambda module, layers, weights: self._layout.prepare(
                module, layers, path=path, weights=weights
            ),
            is_sharded=self.waits_for_step,
        )
        self._media = SampleMedia(self._model.family, MediaLibrary(config, model_path=path))
        self._parameters = self._layout.open_parameters(self._model.module)

    def _train_all(self, value_batches: Iterable[ValueBatch]) -> None:
        """Run micro-batches forward and backward; see `ValueTraining`."""
        calls: ModelCalls[ValueBatch] = ModelCalls(
            lambda one: (self._model.token_values(one.batch),),
            self._compute_loss,
            self._model.idle_output,
            lambda: self._report_progress(),
        )
        self._layout.train(value_batches, calls)

    def _score_groups(self, paths: Sequence[TokenSequence]) -> list[list[int]]:
        return list(group_by_padded_length(paths, max_tokens=self.max_cells))

    def _pack_scored(self, samples: Sequence[TokenSequence]) -> PackedBatch:
        batch = pack_in_own_rows(samples, vocab_size=self._model.vocab_size)
        return self._media.add_to(batch, samples)

    def _score_all(self, batches: Sequence[PackedBatch]) -> Iterator[NDArray[np.float32]]:
        """Yield the values of micro-batches; see `ValueTraining`."""
        passes = self._layout.run_together(
            batches,
            run_idle=self._model.idle_output,
            report_progress=lambda: self._report_progress(),
        )
        with torch.no_grad():
            for batch in passes:
                yield self._layout.memory.run(batch, partial(self._compute_values, batch))

    def _compute_values(self, batch: PackedBatch) -> NDArray[np.float32]:
        values: NDArray[np.float32] = self._model.token_values(batch).float().cpu().numpy()
        return values
