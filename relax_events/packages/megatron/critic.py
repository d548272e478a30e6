"""Implements the critic of the backend `megatron`: a value model that several ranks hold together,
laid out as the policy is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from relax_events.api.training import DataRanks, RunConfig
from relax_events.media.library import MediaLibrary
from relax_events.models.families import read_family
from relax_events.packages.megatron.cpu import cuda_calls_on_cpu
from relax_events.packages.megatron.layout import rank_shards
from relax_events.packages.megatron.opening import (
    build_own_towers,
    needs_megatron,
    open_rank_device,
    read_sizes,
    start_ranks,
)
from relax_events.packages.megatron.passes import (
    StageCalls,
    compute_outputs,
    guard_passes,
    train_passes,
)
from relax_events.training.backend.value_training import ValueBatch, ValueTraining
from relax_events.training.batch.packing import PackedBatch, micro_batch_slices, pack
from relax_events.training.batch.row_layout import TokenSequence, read_array
from relax_events.training.batch.sample_intake import SampleMedia

if TYPE_CHECKING:
    from relax_events.packages.megatron.rank_parameters import RankParameters
    from relax_events.packages.megatron.value_stage import ValueStage

BACKBONE = "backbone."
"""How the names of the decoder's parameters begin in a critic's checkpoints, as in those of backend
`torch`."""


class MegatronCritic(ValueTraining):
    """Implements `Critic`. `step` and `score` are collective over all ranks."""

    _model: ValueStage
    _parameters: RankParameters
    waits_for_step = True
    cuts_samples = True

    _choose_data_ranks = staticmethod(DataRanks)

    def _open_model(self, dtype: torch.dtype) -> None:
        """Load this rank's part of the critic; see `StepTraining`."""
        config, ranks = self._config, self._ranks
        device = open_rank_device(config.model.device, ranks=ranks, threads=config.critic.threads)
        with ranks.guard("building the critic"), cuda_calls_on_cpu(), needs_megatron():
            self._model, self._parameters = self._build(config, device, dtype)

    def _build(
        self, config: RunConfig, device: torch.device, dtype: torch.dtype
    ) -> tuple[ValueStage, RankParameters]:
        from relax_events.packages.megatron.rank_parameters import RankParameters
        from relax_events.packages.megatron.value_stage import ValueStage

        ranks, trainer = self._ranks, self._trainer
        path = config.critic.model_path or config.model.path
        family = read_family(path, config.model.media)
        self._media = SampleMedia(family, MediaLibrary(config, model_path=path))
        sizes = read_sizes(path, ranks.topology, family).as_critic()
        start_ranks(
            ranks,
            seed=config.run.seed,
            timeout_seconds=trainer.collective_timeout_seconds,
        )
        towers = build_own_towers(config.model, path, family, ranks.at, dtype=dtype, device=device)
        stage = ValueStage(
            sizes, ranks.topology, trainer=trainer, dtype=dtype, device=device, towers=towers
        )
        stage.load(path, list(rank_shards(sizes, ranks.topology, ranks.at)))
        named = sizes.named_below(BACKBONE)
        shards = list(rank_shards(named, ranks.topology, ranks.at))
        return stage, RankParameters(stage.module, shards, sizes=named, config=trainer, ranks=ranks)

    def _train_all(self, value_batches: Iterable[ValueBatch]) -> None:
        """Run micro-batches forward and backward; see `ValueTraining`."""
        from relax_events.packages.megatron.stage import Work

        calls: StageCalls[ValueBatch] = StageCalls(
            lambda one, loss: Work(one.batch, loss),
            self._compute_loss,
            lambda: self._report_progress(),
        )
        train_passes(self._model, list(value_batches), self._ranks, calls)

    def _score_groups(self, paths: Sequence[TokenSequence]) -> list[list[int]]:
        """Return micro-batches of all paths in order, within the budget."""
        lengths = [len(read_array(path, "tokens")) for path in paths]
        slices = micro_batch_slices(lengths, max_tokens=self.max_cells)
        return [list(range(len(paths)))[part] for part in slices]

    def _pack_scored(self, samples: Sequence[TokenSequence]) -> PackedBatch:
        batch = pack(samples, vocab_size=self._model.vocab_size, share_rows=True)
        return self._media.add_to(batch, samples)

    def _score_all(self, batches: Sequence[PackedBatch]) -> Iterator[NDArray[np.floating]]:
        """Yield the values of micro-batches, zeros where another pipeline stage has them; see
        `ValueTraining`.
        """
        for values in compute_outputs(self._model, batches, self._ranks):
            yield values.astype(np.float32, copy=False)

    def _guard(self, what: str) -> AbstractContextManager[None]:
        return guard_passes(self._ranks, what)
