"""Implements the trainer backend `torch`: a Hugging Face model, data parallel over ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import structlog
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from relax_events.config import RunConfig
from relax_events.errors import ConfigError
from relax_events.media.library import MediaLibrary
from relax_events.models.adapters import (
    BASE_DIGEST,
    Adapters,
    base_state,
    published_parameters,
    take_base_state,
)
from relax_events.models.causal_lm import choose_device
from relax_events.models.families import Family, freeze
from relax_events.models.offload import Offload
from relax_events.training.backend.determinism import (
    GENERATORS,
    generator_states,
    make_deterministic,
    restore_generators,
)
from relax_events.training.backend.flat_parameters import FlatParameters
from relax_events.training.backend.policy_model import PolicyModel
from relax_events.training.backend.policy_training import PolicyTraining
from relax_events.training.backend.protocol import Critic, Scorer, StepMetrics
from relax_events.training.backend.recomputation import recompute_layers
from relax_events.training.backend.sharded_parameters import ShardedParameters, shard_model
from relax_events.training.backend.state import StateSource, TrainerState
from relax_events.training.backend.weight_stream import split_into_buckets
from relax_events.training.batch.loss_batch import LossBatch
from relax_events.training.batch.sample_intake import SampleMedia
from relax_events.training.ranks import Ranks

log = structlog.get_logger()


class TorchBackend(PolicyTraining):
    """Implements `TrainerBackend`. On the CPU the same micro-batches in the same order give the
    same bits.
    """

    _model: PolicyModel
    _parameters: FlatParameters | ShardedParameters

    def __init__(
        self, config: RunConfig, *, ranks: Ranks, dtype: torch.dtype | None = None
    ) -> None:
        """Load the model of a run at version 0.

        Args:
            config: The run.
            ranks: This process and its peers.
            dtype: Of the weights instead of `model.dtype`, for tests in float64.
        Raises:
            ConfigError: The model can't be loaded or trained by this backend.
        """
        super().__init__(config, ranks=ranks)
        device = choose_device(config.model.device, local_rank=ranks.local_rank)
        make_deterministic(device, threads=config.trainer.threads)
        torch.manual_seed(config.run.seed)
        self._is_sharded = config.trainer.sharding == "full" and ranks.size > 1
        self.waits_for_step = self._is_sharded
        self._model = PolicyModel(
            config.model.path,
            config=config.model,
            device=device,
            dtype=dtype,
            balances_experts=config.algorithm.load_balancing_coefficient > 0,
            prepare=self._prepare_model,
        )
        self._media = SampleMedia(self._model.family, MediaLibrary(config))
        self._parameters = self._make_parameters()
        self._offload = Offload(config.devices_directory)
        self._keeps_gradients = False

    def _prepare_model(
        self, module: PreTrainedModel, family: Family, adapters: Adapters | None
    ) -> None:
        """Freeze parts of the loaded model or initialise its adapters, set what it recomputes, and
        shard it.
        """
        config = self._config
        if adapters is None:
            freeze(module, config.model.frozen, family=family)
        else:
            adapters.initialise(seed=config.run.seed)
        recomputed = config.trainer.activation_checkpointing
        if recomputed == "none" and not self._is_sharded:
            return
        layers = getattr(family.language_model(module), "layers", None)
        if not isinstance(layers, nn.ModuleList):
            raise ConfigError(
                f"trainer.sharding and trainer.activation_checkpointing need a list of decoder "
                f"layers, and the model in {config.model.path} has none; set both to 'none'"
            )
        recompute_layers(layers, recomputed)
        if not self._is_sharded:
            return
        with self._ranks.guard("sharding the model"):
            shard_model(
                module,
                layers=layers,
                device=choose_device(config.model.device, local_rank=self._ranks.local_rank),
            )

    def _make_parameters(self) -> FlatParameters | ShardedParameters:
        module, trainer = self._model.module, self._config.trainer
        if self._is_sharded:
            return ShardedParameters(module, config=trainer, ranks=self._ranks)
        return FlatParameters(module, config=trainer)

    @property
    def attention_cost(self) -> float:
        """Cost of a pair of tokens; see `TrainerBackend`."""
        return self._model.cell_cost

    @property
    def is_collective(self) -> bool:
        """False: each rank has the whole model."""
        return False

    def _run_together(self, loss_batches: Sequence[LossBatch]) -> Iterator[LossBatch]:
        """Yield micro-batches whose forward passes the caller runs. Where these are collective, run
        empty ones as often as other ranks have more.
        """
        most = len(loss_batches)
        if self._is_sharded:
            most = int(self._ranks.all_gather(np.array([most])).max())
        yield from loss_batches
        for _ in range(most - len(loss_batches)):
            output = self._model.idle_output()
            if torch.is_grad_enabled():
                output.backward()
            self._report_progress()

    def _train_all(self, loss_batches: Sequence[LossBatch], *, cutoff: float | None = None) -> None:
        """Run micro-batches forward and backward; see `PolicyTraining`."""
        for loss_batch in self._run_together(loss_batches):
            ids = loss_batch.token_sets.ids if loss_batch.token_sets else None
            result = self._model.token_logprobs(
                loss_batch.batch,
                entropy_gradient=self._config.algorithm.entropy_coefficient > 0,
                ids=ids,
            )
            loss, sums = self._compute_loss(loss_batch, result, cutoff)
            loss.backward()
            self._record(loss_batch, sums, self._parameters.gradient_sum())
            self._report_progress()

    def _score_all(self, loss_batches: Sequence[LossBatch]) -> Iterator[NDArray[np.floating]]:
        """Yield the log-probabilities of micro-batches; see `PolicyTraining`."""
        with torch.no_grad():
            for loss_batch in self._run_together(loss_batches):
                logprobs: NDArray[np.floating] = (
                    self._model.token_logprobs(loss_batch.batch).logprobs.cpu().numpy()
                )
                yield logprobs

    def step(self) -> StepMetrics:
        """Reduce, normalise, clip, update; see `TrainerBackend`."""
        if not self._is_sharded:
            return super().step()
        with self._ranks.guard("a forward or backward pass"):
            return super().step()

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

    def state(self) -> TrainerState:
        """Show weights in master precision, AdamW's moments and generators; see
        `TrainerBackend`.
        """
        others = generator_states(self._model.device) | base_state(self._model.adapters)
        return self._parameters.state(self.policy_version, others=others)

    def load_state(self, state: StateSource) -> None:
        """Resume from a state; see `TrainerBackend`. The state of a missing device's generator is
        ignored.
        """
        base_state = {
            name: state.read(name)
            for name in state.shapes
            if name == BASE_DIGEST or name.startswith(GENERATORS)
        }
        generators = take_base_state(base_state, self._model.adapters)
        self._parameters.load(state, without=base_state)
        self._reset_step()
        self.policy_version = state.policy_version
        restore_generators(generators, self._model.device)

    def move_away(self) -> int:
        """Free the device's memory; see `OffloadingBackend`. Gradients are kept in the middle of a
        step.
        """
        self._keeps_gradients = bool(self._micro_batches)
        kept, rebuilt = self._parameters.memory(with_gradients=self._keeps_gradients)
        others = (
            parameter
            for parameter in self._model.module.parameters()
            if not parameter.requires_grad
        )
        return self._offload.move_away([*kept, *others], dropped=rebuilt)

    def bring_back(self) -> None:
        """Restore the state; see `OffloadingBackend`."""
        if self._offload.is_away:
            self._offload.bring_back()
            self._parameters.rebuild(with_gradients=self._keeps_gradients)

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
