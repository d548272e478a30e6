"""Implements the trainer backend `torch`: a Hugging Face model, data parallel over ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import structlog
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from relax_events.algorithms.objective import Objective
from relax_events.config import RunConfig
from relax_events.errors import ConfigError, RunFailed, StepNotFinite
from relax_events.events.routed_experts import ExpertShape
from relax_events.events.types import SampleReady
from relax_events.media.library import MediaLibrary
from relax_events.models.adapters import (
    BASE_DIGEST,
    base_state,
    published_parameters,
    take_base_state,
)
from relax_events.models.causal_lm import choose_device
from relax_events.models.families import Family, freeze
from relax_events.runtime.failpoints import failpoint
from relax_events.training.backend.determinism import (
    GENERATORS,
    generator_states,
    make_deterministic,
    restore_generators,
)
from relax_events.training.backend.flat_parameters import FlatParameters
from relax_events.training.backend.learning_rate import compute_policy_learning_rate
from relax_events.training.backend.policy_model import PolicyModel
from relax_events.training.backend.protocol import Critic, Scorer, StepMetrics
from relax_events.training.backend.recomputation import recompute_layers
from relax_events.training.backend.sharded_parameters import ShardedParameters, shard_model
from relax_events.training.backend.state import StateSource, TrainerState
from relax_events.training.backend.step_sums import (
    MicroBatchSums,
    OptimizerStep,
    Totals,
    build_pass_metrics,
    build_step_metrics,
    gather_totals,
    sum_micro_batch,
)
from relax_events.training.backend.weight_stream import split_into_buckets
from relax_events.training.batch.loss_batch import LossBatch, whiten_step
from relax_events.training.batch.mini_batches import MiniBatchBuffer
from relax_events.training.batch.packing import cut_by_cells
from relax_events.training.batch.sample_intake import SampleMedia
from relax_events.training.batch.step_statistics import compute_second_moment_cutoff
from relax_events.training.ranks import Ranks

log = structlog.get_logger()


class TorchBackend:
    """Implements `TrainerBackend`. On the CPU the same micro-batches in the same order give the
    same bits.
    """

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
        self.policy_version = 0
        self._config = config
        self._ranks = ranks
        device = choose_device(config.model.device, local_rank=ranks.local_rank)
        make_deterministic(device, threads=config.trainer.threads)
        torch.manual_seed(config.run.seed)
        self._is_sharded = config.trainer.sharding == "full" and ranks.size > 1
        self._model = PolicyModel(
            config.model.path,
            config=config.model,
            device=device,
            dtype=dtype,
            prepare=self._prepare_model,
        )
        if self._model.adapters is not None:
            self._model.adapters.initialise(seed=config.run.seed)
        self._media = SampleMedia(self._model.family, MediaLibrary(config))
        self._flat = self._make_parameters()
        self._objective = Objective(
            config.algorithm, max_new_tokens=config.engine.sampling.max_new_tokens
        )
        self._micro_batches: list[MicroBatchSums] = []
        self._deferred: list[LossBatch] = []
        whole = config.algorithm.needs_whole_groups
        self._batch = MiniBatchBuffer(
            config.trainer, seed=config.run.seed, ranks=ranks, whole_prompt_groups=whole
        )
        self._report_progress: Callable[[], None] = lambda: None

    def _prepare_model(self, module: PreTrainedModel, family: Family) -> None:
        """Freeze parts of the loaded model, set what it recomputes, and shard it."""
        config = self._config
        if config.model.lora is None:
            freeze(module, config.model.frozen, family=family)
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
        if family.layout is not None:
            raise ConfigError(
                f"trainer.sharding = 'full' shards models that read text only, and the one in "
                f"{config.model.path} has towers; set trainer.sharding = 'none'"
            )
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
    def vocab_size(self) -> int:
        """Bound of the token ids that the model takes."""
        return self._model.vocab_size

    @property
    def experts(self) -> ExpertShape | None:
        """Shape of the replayed routing; None where the model routes by itself."""
        return self._model.experts

    @property
    def attention_cost(self) -> float:
        """Cost of a pair of tokens; see `TrainerBackend`."""
        return self._model.cell_cost

    @property
    def is_collective(self) -> bool:
        """False: each rank has the whole model."""
        return False

    def accumulate(self, micro_batch: Sequence[SampleReady]) -> None:
        """Run forward and backward on a micro-batch; see `TrainerBackend`. If statistics of
        the whole step are needed first, `step` runs it.
        """
        if not micro_batch:
            return
        # All parts are packed before the first is trained, so that an invalid sample is found
        # before anything was added.
        for part, loss_batch in [(part, self._pack(part)) for part in self._split(micro_batch)]:
            if not len(loss_batch.batch.targets):
                continue
            if self._config.trainer.has_mini_batches:
                self._defer(part, loss_batch)
            elif self._is_sharded or self._config.algorithm.needs_whole_step:
                self._deferred.append(loss_batch)
            else:
                self._train(loss_batch)

    def _defer(self, samples: Sequence[SampleReady], loss_batch: LossBatch) -> None:
        """Keep samples for the mini-batches of their step, with old log-probabilities of the
        weights before it.
        """
        self._batch.add(samples, loss_batch.batch.num_loss_tokens)
        if self._is_sharded:
            self._deferred.append(loss_batch)  # the forward pass waits until all ranks run theirs
            return
        self._deferred.append(self._with_old_logprobs(loss_batch).without_model_inputs())

    @torch.no_grad()
    def _with_old_logprobs(self, loss_batch: LossBatch) -> LossBatch:
        """Add the old log-probabilities, where the trainer computes them."""
        algorithm = self._config.algorithm
        if algorithm.old_logprobs != "trainer" or not algorithm.has_rewards:
            return loss_batch
        return loss_batch.with_old_logprobs(
            self._model.token_logprobs(loss_batch.batch).logprobs.cpu().numpy()
        )

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

    def on_progress(self, report_progress: Callable[[], None]) -> None:
        """Call this after each micro-batch that `step` runs; see `TrainerBackend`."""
        self._report_progress = report_progress

    def _split(self, micro_batch: Sequence[SampleReady]) -> Sequence[Sequence[SampleReady]]:
        """Split a micro-batch by its padded size where each sample has its own row."""
        if self._model.shares_rows:
            return [micro_batch]
        max_cells, whole = (
            self._config.trainer.max_tokens_per_micro_batch,
            self._config.algorithm.needs_whole_groups,
        )
        return cut_by_cells(micro_batch, max_cells=max_cells, whole_prompt_groups=whole)

    def _pack(self, samples: Sequence[SampleReady]) -> LossBatch:
        algorithm, model = self._config.algorithm, self._model
        sharing = model.prompt_sharing if self._config.trainer.share_prompts else None
        loss_batch = LossBatch.from_samples(
            samples,
            algorithm=algorithm,
            vocab_size=model.vocab_size,
            share_rows=model.shares_rows,
            sharing=sharing,
            experts=model.experts,
        )
        if not len(loss_batch.batch.targets):
            return loss_batch
        return replace(loss_batch, batch=self._media.add_to(loss_batch.batch, samples))

    def _mini_batches(self) -> Iterator[tuple[int, list[LossBatch]]]:
        """Yield the micro-batches of each optimizer step, and its pass. The start is collective."""
        if not self._config.trainer.has_mini_batches:
            yield 0, self._deferred
            return
        if self._is_sharded:
            self._deferred = [
                self._with_old_logprobs(deferred).without_model_inputs()
                for deferred in self._run_without_gradients(self._deferred)
            ]
        values = {
            sample_id: own
            for deferred in self._deferred
            for sample_id, own in deferred.values_by_sample().items()
        }
        is_empty = True
        for epoch, micro_batches in self._batch.mini_batches(self.policy_version):
            packed = [
                self._pack(part)
                for micro_batch in micro_batches
                for part in self._split(micro_batch)
            ]
            yield epoch, [one.with_values(values) for one in packed if len(one.batch.targets)]
            is_empty = False
        if is_empty:
            yield 0, []

    def _train_mini_batch(self, mini_batch: Sequence[LossBatch]) -> None:
        """Train the deferred micro-batches of an optimizer step; collective."""
        algorithm, cutoff = self._config.algorithm, None
        if algorithm.m2_threshold:
            cutoff = compute_second_moment_cutoff(
                map(self._squared_log_ratios, self._run_without_gradients(mini_batch)),
                threshold=algorithm.m2_threshold,
                ranks=self._ranks,
            )
        for deferred in self._run_together(mini_batch):
            self._train(deferred, cutoff=cutoff)
            self._report_progress()

    def _run_without_gradients(self, loss_batches: Sequence[LossBatch]) -> Iterator[LossBatch]:
        """As `_run_together`, for a caller that computes no gradients."""
        with torch.no_grad():
            yield from self._run_together(loss_batches)

    @torch.no_grad()
    def _squared_log_ratios(self, deferred: LossBatch) -> NDArray[np.float64]:
        logprobs = self._model.token_logprobs(deferred.batch).logprobs.double().cpu().numpy()
        squares: NDArray[np.float64] = np.square(logprobs - deferred.values["rollout"])
        return squares

    def _train(self, loss_batch: LossBatch, *, cutoff: float | None = None) -> None:
        """Add the gradients and metrics of a micro-batch to the step's."""
        device_sums = self._forward_backward(loss_batch, cutoff)
        # The sum of all gradients stays non-finite after the first micro-batch that broke one;
        # checked once, at the step's end.
        device_sums = torch.cat([device_sums, self._flat.gradient_sum().double()[None]])
        batch = loss_batch.batch
        units = self._objective.num_units(torch.from_numpy(batch.num_loss_tokens))
        counts = (units, len(batch.targets), batch.num_tokens, len(loss_batch.sample_ids))
        self._micro_batches.append(MicroBatchSums(device_sums, counts, loss_batch.sample_ids))

    def _forward_backward(self, loss_batch: LossBatch, cutoff: float | None) -> Tensor:
        ids = loss_batch.token_sets.ids if loss_batch.token_sets else None
        result = self._model.token_logprobs(
            loss_batch.batch,
            entropy_gradient=self._config.algorithm.entropy_coefficient > 0,
            ids=ids,
        )
        inputs = loss_batch.objective_inputs(result, cutoff=cutoff)
        tokens = self._objective(inputs)
        (tokens.token_weights * tokens.losses).sum().backward()
        return sum_micro_batch(tokens, inputs, metrics=self._config.algorithm.spec.metrics)

    def step(self) -> StepMetrics:
        """Reduce, normalise, clip, update; see `TrainerBackend`."""
        if not self._is_sharded:
            return self._step()
        with self._ranks.guard("a forward or backward pass"):
            return self._step()

    def _step(self) -> StepMetrics:
        learning_rate = compute_policy_learning_rate(self._config, step=self.policy_version)
        try:
            self._deferred = whiten_step(
                self._deferred, algorithm=self._config.algorithm, ranks=self._ranks
            )
            updates, pass_metrics = self._take_updates(learning_rate)
        except RunFailed:
            self.discard()
            raise
        self._reset_step()
        self.policy_version += 1
        metrics = build_step_metrics(updates, learning_rate=learning_rate)
        return (
            replace(metrics, algorithm_metrics={**metrics.algorithm_metrics, **pass_metrics})
            if self._config.trainer.has_mini_batches
            else metrics
        )

    def _take_updates(self, learning_rate: float) -> tuple[list[OptimizerStep], dict[str, float]]:
        """Take the optimizer steps of the train step; return them and the metrics of their passes.
        A step that is not finite is skipped.

        Raises:
            StepNotFinite: No step was finite.
        """
        updates: list[OptimizerStep] = []
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
                self._flat.zero_gradients()
            else:
                is_stopped = update is None
                updates += [] if update is None else [update]
                failpoint("trainer.after_optimizer_step")
            self._micro_batches = []
            if is_stopped:
                break
        if not updates:
            raise failed[-1]
        for skipped in failed:
            log.error("mini_batch.skipped", error=str(skipped))
        return updates, build_pass_metrics(
            updates, num_not_finite=len(failed), is_stopped=is_stopped
        )

    def _update(
        self, epoch: int, learning_rate: float, *, name: str, may_stop: bool
    ) -> OptimizerStep | None:
        """Take an optimizer step with the accumulated gradients; None if the policy exceeds
        `trainer.max_kl`, and the gradients are discarded.

        Raises:
            StepNotFinite: Loss or gradient is not finite, on all ranks.
        """
        metrics = self._config.algorithm.spec.metrics
        totals, mismatch_max, own = gather_totals(
            self._micro_batches, ranks=self._ranks, name=name, metrics=metrics
        )
        if may_stop and self._exceeds_max_kl(totals):
            self._flat.zero_gradients()
            return None
        grad_norm = self._reduced_grad_norm(totals, name=name)
        self._flat.update(
            learning_rate=learning_rate,
            gradient_scale=min(1.0, self._config.trainer.max_grad_norm / (grad_norm + 1e-6)),
        )
        return OptimizerStep(epoch, totals, mismatch_max, own, grad_norm)

    def _step_name(self, number: int) -> str:
        """Return the name of an optimizer step for errors."""
        return f"train step {self.policy_version}" + (
            f", optimizer step {number}" if self._config.trainer.has_mini_batches else ""
        )

    def _exceeds_max_kl(self, totals: Totals) -> bool:
        """Return whether the policy's KL in this train step exceeds the bound."""
        bound = self._config.trainer.max_kl
        return bound > 0 and totals.policy_kl / totals.num_loss_tokens > bound

    def _reduced_grad_norm(self, totals: Totals, *, name: str) -> float:
        if not totals.num_loss_tokens:
            raise RunFailed(
                f"{name} holds no loss token on any rank; do its samples have completions?"
            )
        self._flat.reduce_gradients(self._ranks)
        grad_norm = self._flat.normalise_gradients(totals.num_units)
        if not math.isfinite(grad_norm):
            raise StepNotFinite(
                f"{name}: the gradient's norm must be finite, got {grad_norm} over all ranks; "
                "the weights are those before it; lower trainer.learning_rate"
            )
        return grad_norm

    def discard(self) -> None:
        """Discard the accumulated gradients; see `TrainerBackend`."""
        self._reset_step()
        self._flat.zero_gradients()

    def _reset_step(self) -> None:
        self._micro_batches, self._deferred = [], []
        self._batch.clear()

    def skip_step(self) -> None:
        """Count up without an update; see `TrainerBackend`."""
        self.discard()
        self.policy_version += 1

    def weight_buckets(self, *, max_bytes: int) -> Iterator[dict[str, Tensor]]:
        """Yield the weights on rank 0's CPU, tied tensors once, or the adapters alone; see
        `TrainerBackend`.
        """
        if isinstance(self._flat, ShardedParameters):
            with self._ranks.guard("gathering the weights"):
                yield from self._flat.weight_buckets(max_bytes=max_bytes, dtype=self._model.dtype)
            return
        parameters = published_parameters(self._model.module)
        for names in split_into_buckets(parameters, max_bytes=max_bytes):
            yield {
                name: parameters[name].detach().to("cpu", copy=True)
                for name in names
                if self._ranks.rank == 0
            }

    def state(self) -> TrainerState:
        """Show weights in master precision, AdamW's moments and generators; see
        `TrainerBackend`.
        """
        return TrainerState(
            policy_version=self.policy_version,
            tensors=self._flat.tensors()
            | generator_states(self._model.device)
            | base_state(self._model.adapters),
            shards=self._flat.shards(),
        )

    def load_state(self, state: StateSource) -> None:
        """Resume from a state; see `TrainerBackend`. The state of a missing device's generator is
        ignored.
        """
        own = {
            name: state.read(name)
            for name in state.shapes
            if name == BASE_DIGEST or name.startswith(GENERATORS)
        }
        generators = take_base_state(own, self._model.adapters)
        self._flat.load(state, without=own)
        self._reset_step()
        self.policy_version = state.policy_version
        restore_generators(generators, self._model.device)

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
    def open_critic(config: RunConfig) -> Critic:
        """Load the critic as it is before the run's first step; see `TrainerBackend`."""
        from relax_events.training.backend.torch_critic import TorchCritic

        return TorchCritic(config)
