"""Implements the trainer backend `torch`: a Hugging Face model, data parallel over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from relax_events.config import RunConfig
from relax_events.media.library import MediaLibrary
from relax_events.models.adapters import Adapters, published_parameters
from relax_events.models.causal_lm import open_device
from relax_events.models.families import Family, freeze
from relax_events.models.folder_weights import FolderWeights
from relax_events.models.routers import Routers
from relax_events.training.backend.determinism import make_deterministic
from relax_events.training.backend.flat_parameters import FlatParameters
from relax_events.training.backend.policy_model import PolicyModel, TokenLogprobs
from relax_events.training.backend.policy_training import PolicyTraining
from relax_events.training.backend.protocol import Critic, Scorer
from relax_events.training.backend.sharded_parameters import ShardedParameters
from relax_events.training.backend.step_training import ModelPass, Outputs, list_passes
from relax_events.training.backend.torch_layout import ModelCalls, TorchLayout
from relax_events.training.backend.weight_stream import split_into_buckets
from relax_events.training.batch.loss_batch import LossBatch
from relax_events.training.batch.sample_intake import SampleMedia
from relax_events.training.ranks import Ranks


class TorchBackend(PolicyTraining):
    """Implements `TrainerBackend`. On the CPU the same micro-batches in the same order give the
    same bits.
    """

    _model: PolicyModel
    _parameters: FlatParameters | ShardedParameters
    cuts_samples = True

    def _open_model(self, dtype: torch.dtype) -> None:
        """Load the whole model; see `StepTraining`."""
        config, ranks = self._config, self._ranks
        device = self._device = open_device(config.model.device, local_rank=ranks.local_rank)
        make_deterministic(device, threads=config.trainer.threads)
        torch.manual_seed(config.run.seed)
        self.waits_for_step = self._is_sharded()
        self._layout = TorchLayout(
            config.trainer, ranks=ranks, device=device, is_sharded=self.waits_for_step
        )
        self._model = PolicyModel(
            config.model.path,
            config=config.model,
            device=device,
            dtype=dtype,
            balances_experts=config.algorithm.load_balancing_coefficient > 0,
            prepare=self._prepare_model,
            is_sharded=self.waits_for_step,
        )
        self._media = SampleMedia(self._model.family, MediaLibrary(config))
        self._parameters = self._layout.open_parameters(self._model.module)

    def _is_sharded(self) -> bool:
        return self._config.trainer.sharding == "full" and self._ranks.size > 1

    def _prepare_model(
        self,
        module: PreTrainedModel,
        family: Family,
        adapters: Adapters | None,
        routers: Routers | None,
        weights: FolderWeights | None,
    ) -> None:
        """Freeze parts of the model, set what it recomputes, shard and fill it, and initialise its
        adapters.
        """
        config = self._config
        if adapters is None:
            freeze(module, config.model.frozen, family=family)
        layers = getattr(family.language_model(module), "layers", None)
        path = config.model.path
        if routers is None:
            self._layout.prepare(module, layers, path=path, weights=weights)
        else:
            self._layout.prepare(module, layers, path=path, weights=weights, bind=routers.bind)
        if adapters is not None:
            adapters.initialise(seed=config.run.seed)

    @property
    def attention_cost(self) -> float:
        """Cost of a pair of tokens; see `TrainerBackend`."""
        return self._model.cell_cost

    @property
    def is_collective(self) -> bool:
        """False: each rank has the whole model."""
        return False

    def _train_all(self, loss_batches: Sequence[LossBatch], *, cutoff: float | None = None) -> None:
        """Run micro-batches forward and backward; see `PolicyTraining`."""

        def run(one: ModelPass[LossBatch]) -> TokenLogprobs:
            sets = one.whole.token_sets
            return self._model.token_logprobs(
                one.batch,
                entropy_gradient=self._config.algorithm.entropy_coefficient > 0,
                ids=sets.ids[one.tokens] if sets else None,
            )

        def compute_loss(whole: LossBatch, outputs: Outputs) -> tuple[Tensor, Callable[[], None]]:
            loss, sums = self._compute_loss(whole, TokenLogprobs(*outputs), cutoff)
            return loss, lambda: self._record(whole, sums, self._parameters.gradient_sum())

        calls = ModelCalls(
            run, compute_loss, self._model.idle_output, lambda: self._report_progress()
        )
        self._layout.train(loss_batches, calls)

    def _score_all(self, loss_batches: Sequence[LossBatch]) -> Iterator[NDArray[np.floating]]:
        """Yield the log-probabilities of micro-batches; see `PolicyTraining`."""
        logprobs: list[NDArray[np.floating]] = []
        passes = self._layout.run_together(
            list_passes(loss_batches),
            run_idle=self._model.idle_output,
            report_progress=lambda: self._report_progress(),
        )
        with torch.no_grad():
            for one in passes:
                run = partial(self._model.token_logprobs, one.batch)
                result = self._layout.memory.run(one.batch, run)
                logprobs.append(result.logprobs.cpu().numpy())
                if one.is_last:
                    yield np.concatenate(logprobs)
                    logprobs.clear()

    def weight_buckets(self, *, max_bytes: int) -> Iterator[dict[str, Tensor]]:
        """Yield the weights, tied tensors once, or the adapters alone; see `TrainerBackend`."""
        if isinstance(self._parameters, ShardedParameters):
            with self._ranks.guard("gathering the weights"):
                yield from self._parameters.weight_buckets(
                    max_bytes=max_bytes, dtype=self._model.dtype
                )
            return
        parameters = published_parameters(self._model.module)
        for names in split_into_buckets(parameters, max_bytes=max_bytes):
            yield {name: parameters[name].detach() for name in names if self._ranks.rank == 0}

    @staticmethod
    def open_scorer(config: RunConfig) -> Scorer:
        """Load the initial model for scoring alone; see `TrainerBackend`."""
        from relax_events.training.backend.scoring import LogprobScorer

        model, trainer = config.model, config.trainer
        library = MediaLibrary(config)
        return LogprobScorer(
            model.path,
            model=model,
            threads=trainer.threads,
            max_tokens=trainer.max_tokens_per_micro_batch,
            library=library,
        )

    @staticmethod
    def open_critic(config: RunConfig, ranks: Ranks) -> Critic:
        """Load the critic as it is before the run's first step; see `TrainerBackend`."""
        from relax_events.training.backend.torch_critic import TorchCritic

        return TorchCritic(config, ranks=ranks)
