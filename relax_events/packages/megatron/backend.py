"""Implements the trainer backend `megatron`: a decoder of megatron-core's layers that several ranks
hold together, over tensor (with sequence), pipeline, context, expert and data parallelism.

megatron-core is imported when a trainer is opened: scorers are models of transformers, and need
none of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relax_events.api.errors import ConfigError
from relax_events.api.training import Critic, DataRanks, Ranks, RunConfig, Scorer
from relax_events.media.library import MediaLibrary
from relax_events.models.families import find_part, read_family, require_parts
from relax_events.packages.megatron.adapter_layout import AdapterLayout
from relax_events.packages.megatron.cpu import cuda_calls_on_cpu
from relax_events.packages.megatron.layout import ShardsOf, full_shapes, rank_shards
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
    exchanges_experts,
    guard_passes,
    train_passes,
)
from relax_events.training.backend.policy_model import TokenLogprobs
from relax_events.training.backend.policy_training import PolicyTraining
from relax_events.training.backend.step_training import ModelPass, Outputs, list_passes
from relax_events.training.batch.loss_batch import LossBatch
from relax_events.training.batch.sample_intake import SampleMedia
from relax_events.training.batch.shared_prefixes import PrefixSharing

if TYPE_CHECKING:
    from relax_events.packages.megatron.rank_parameters import RankParameters
    from relax_events.packages.megatron.stage import LossFunction, ModelStage, Work


class MegatronBackend(PolicyTraining):
    """Implements `TrainerBackend`. All micro-batches run in `step`, on all ranks that hold the
    model together.
    """

    _model: ModelStage
    _parameters: RankParameters
    waits_for_step = True
    cuts_samples = True

    _choose_data_ranks = staticmethod(DataRanks)

    def _open_model(self, dtype: torch.dtype) -> None:
        """Load this rank's part of the model; see `StepTraining`."""
        config, ranks = self._config, self._ranks
        self._device = open_rank_device(
            config.model.device, ranks=ranks, threads=config.trainer.threads
        )
        torch.manual_seed(config.run.seed)
        path = config.model.path
        self._family = read_family(path, config.model.media)
        self._media = SampleMedia(self._family, MediaLibrary(config))
        sizes = read_sizes(path, ranks.topology, self._family)
        if config.model.replays_routing and not sizes.num_experts:
            raise ConfigError(
                "model.routing_replay needs a mixture of experts, but the model in "
                f"{path} is not one; set model.routing_replay = 'none'"
            )
        if config.algorithm.load_balancing_coefficient and not sizes.num_experts:
            raise ConfigError(
                "algorithm.load_balancing_coefficient needs a mixture of experts, but the model in "
                f"{path} is not one; leave it out"
            )
        self._sizes = sizes
        self._lora = config.model.lora
        self._shards_of: ShardsOf = rank_shards
        if self._lora is not None:
            layout = AdapterLayout(self._lora)
            layout.require_fits(sizes, ranks.topology)
            self._shards_of = layout
        self._dtype = dtype
        with ranks.guard("building the model"), cuda_calls_on_cpu(), needs_megatron():
            self._model, self._parameters = self._build()
        from relax_events.packages.megatron.weight_gathering import WeightGathering

        self._weights = WeightGathering(
            self._model.module, sizes, ranks=ranks, shards_of=self._shards_of
        )

    def _build(self) -> tuple[ModelStage, RankParameters]:
        from relax_events.packages.megatron.adapters import initialise_adapters
        from relax_events.packages.megatron.rank_parameters import RankParameters
        from relax_events.packages.megatron.stage import ModelStage

        model, trainer, ranks = self._config.model, self._config.trainer, self._ranks
        start_ranks(
            ranks,
            seed=self._config.run.seed,
            timeout_seconds=trainer.collective_timeout_seconds,
        )
        stage = ModelStage(
            self._sizes, ranks.topology, trainer=trainer, dtype=self._dtype, device=self._device,
            replays_routing=model.replays_routing,
            balance_coefficient=self._config.algorithm.load_balancing_coefficient,
            towers=build_own_towers(
                model, model.path, self._family, ranks.at, dtype=self._dtype, device=self._device
            ),
            sharing=PrefixSharing(self._family.layout),
        )  # fmt: skip
        shards = list(rank_shards(self._sizes, ranks.topology, ranks.at))
        stage.load(model.path, shards)
        shapes = full_shapes(self._sizes, self._shards_of)
        if self._lora is not None:
            shards = stage.add_adapters(self._lora, ranks.topology, ranks.at)
            initialise_adapters(stage.module, shards, shapes, seed=self._config.run.seed)
        return stage, RankParameters(
            stage.module, shards, sizes=self._sizes, config=trainer, ranks=ranks, shapes=shapes,
            frozen=self._frozen_names(),
        )  # fmt: skip

    def _frozen_names(self) -> list[str]:
        """Return the parameters of the towers that `model.frozen` names."""
        parts = self._config.model.frozen
        require_parts(parts, family=self._family)
        return [
            name for name, _ in self._sizes.towers if find_part(name, family=self._family) in parts
        ]

    @property
    def attention_cost(self) -> float:
        """Cost of a pair of tokens; see `TrainerBackend`."""
        return self._sizes.attention_cost

    @property
    def is_collective(self) -> bool:
        """Whether data-parallel ranks exchange tokens in the experts of each layer."""
        return exchanges_experts(self._ranks.topology)

    def _train_all(self, loss_batches: Sequence[LossBatch], *, cutoff: float | None = None) -> None:
        """Run micro-batches forward and backward; see `PolicyTraining`."""

        def compute_loss(whole: LossBatch, outputs: Outputs) -> tuple[Tensor, Callable[[], None]]:
            loss, sums = self._compute_loss(whole, TokenLogprobs(*outputs), cutoff)
            # a gradient that is not finite shows in the norm, after all micro-batches
            return loss, lambda: self._record(whole, sums, sums.new_zeros(()))

        calls = StageCalls(self._build_work, compute_loss, lambda: self._report_progress())
        passes = train_passes(self._model, loss_batches, self._ranks, calls)
        imbalances = self._model.take_imbalances().cpu()
        if len(imbalances) and self._micro_batches:  # the stage that computes the loss has these
            self._add_imbalances(passes, imbalances.tolist())

    def _build_work(self, one: ModelPass[LossBatch], loss: LossFunction) -> Work:
        from relax_events.packages.megatron.stage import Work

        whole = one.whole.batch
        weights = self._objective.path_weights(
            torch.from_numpy(whole.num_loss_tokens), torch.from_numpy(whole.num_path_loss_tokens)
        ).numpy()
        sets = one.whole.token_sets
        return Work(
            one.batch,
            loss,
            entropy_gradient=self._config.algorithm.entropy_coefficient > 0,
            ids=sets.ids[one.tokens] if sets else None,
            path_weights=weights[one.paths],
        )

    def _score_all(self, loss_batches: Sequence[LossBatch]) -> Iterator[NDArray[np.floating]]:
        """Yield the log-probabilities of micro-batches, zeros where another pipeline stage has
        them; see `PolicyTraining`.
        """
        passes = list(list_passes(loss_batches))
        outputs = compute_outputs(
            self._model,
            [one.batch for one in passes],
            self._ranks,
            on_done=lambda: self._report_progress(),
        )
        logprobs: list[NDArray[np.floating]] = []
        for one, output in zip(passes, outputs, strict=True):
            logprobs.append(output)
            if one.is_last:
                yield np.concatenate(logprobs)
                logprobs.clear()

    def _guard(self, what: str) -> AbstractContextManager[None]:
        return guard_passes(self._ranks, what)

    def weight_buckets(self, *, max_bytes: int) -> Iterator[dict[str, Tensor]]:
        """Yield the weights on rank 0's CPU, tied tensors once; see `TrainerBackend`."""
        with self._ranks.guard("gathering the weights"):
            yield from self._weights.buckets(max_bytes=max_bytes, dtype=self._dtype)

    @staticmethod
    def open_scorer(config: RunConfig) -> Scorer:
        """Load the initial model for scoring alone, as backend `torch` does; see
        `TrainerBackend`.
        """
        from relax_events.training.backend.torch_backend import TorchBackend

        return TorchBackend.open_scorer(config)

    @staticmethod
    def open_critic(config: RunConfig, ranks: Ranks) -> Critic:
        """Load this rank's part of the critic; see `TrainerBackend`."""
        from relax_events.packages.megatron.critic import MegatronCritic

        return MegatronCritic(config, ranks=ranks)
