"""The trainer backend `torch`: a Hugging Face model, data parallel over ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from relax_events.algorithms.losses import Surrogate, kl_estimate, num_units, policy_surrogate, token_weights
from relax_events.config import RunConfig, TrainerConfig
from relax_events.errors import RunFailed
from relax_events.events.types import SampleReady
from relax_events.models.causal_lm import choose_device
from relax_events.training.flat_parameters import FlatParameters
from relax_events.training.packing import PackedBatch, loss_values, pack
from relax_events.training.policy_model import PolicyModel
from relax_events.training.protocol import Scorer, StepFigures, TrainerState
from relax_events.training.ranks import Ranks
from relax_events.training.step_sums import MicroBatchSums, Totals, gather_totals, sum_micro_batch


class TorchBackend:
    """Implements `TrainerBackend`. On the CPU the same micro-batches in the same order give the same bits."""

    def __init__(self, config: RunConfig, *, ranks: Ranks, dtype: torch.dtype | None = None) -> None:
        """Load the model of a run at version 0.

        Args:
            config: The run.
            ranks: This process and its peers.
            dtype: Of the weights instead of `model.dtype`, for proofs in float64.
        Raises:
            ConfigError: The model can't be loaded or trained by this backend.
        """
        self.policy_version = 0
        self._config = config
        self._ranks = ranks
        device = choose_device(config.model.device, local_rank=ranks.local_rank)
        make_deterministic(device, threads=config.trainer.threads)
        torch.manual_seed(config.run.seed)
        self._model = PolicyModel(config.model.path, config=config.model, device=device, dtype=dtype)
        self._flat = FlatParameters(self._model.module, config=config.trainer)
        self._micro_batches: list[MicroBatchSums] = []

    @property
    def vocab_size(self) -> int:
        """Bound of the token ids that the model takes."""
        return self._model.vocab_size

    def accumulate(self, micro_batch: Sequence[SampleReady]) -> None:
        """Run forward and backward on a micro-batch; see `TrainerBackend`."""
        batch = pack(micro_batch, vocab_size=self._model.vocab_size, share_rows=self._model.shares_rows)
        values = self._loss_values(micro_batch)
        if not len(batch.targets):
            return
        device_sums = self._forward_backward(batch, values)
        # The sum over all gradients is not finite from the first micro-batch on that broke one; looked at once, at the step's end.
        device_sums = torch.cat([device_sums, self._flat.gradients.sum().double()[None]])
        num_loss_tokens = torch.from_numpy(batch.num_loss_tokens)
        units = num_units(num_loss_tokens, aggregation=self._config.algorithm.aggregation)
        counts = (units, len(batch.targets), batch.num_tokens, len(micro_batch))
        self._micro_batches.append(MicroBatchSums(device_sums, counts, [sample.sample_id for sample in micro_batch]))

    def _loss_values(self, samples: Sequence[SampleReady]) -> dict[str, Tensor]:
        """Bring per-token arrays to the device: `old`, `rollout`, `advantages`, and `ref` where the algorithm needs it."""
        algorithm = self._config.algorithm
        names = {"old": f"{algorithm.old_logprobs}_logprobs", "rollout": "rollout_logprobs", "advantages": "advantages"}
        if algorithm.kl_coefficient > 0:
            names["ref"] = "ref_logprobs"
        stacked = np.stack([loss_values(samples, field) for field in names.values()])
        return dict(zip(names, torch.from_numpy(stacked).to(self._model.device), strict=True))

    def _forward_backward(self, batch: PackedBatch, values: dict[str, Tensor]) -> Tensor:
        algorithm = self._config.algorithm
        result = self._model.token_logprobs(batch)
        num_loss_tokens = torch.from_numpy(batch.num_loss_tokens).to(self._model.device)
        surrogate = policy_surrogate(
            result.logprobs,
            name=algorithm.name,
            old_logprobs=values["old"],
            advantages=values["advantages"],
            num_loss_tokens=num_loss_tokens,
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
        )
        losses, kl = self._with_kl(surrogate, result.logprobs, values)
        weights = token_weights(num_loss_tokens, aggregation=algorithm.aggregation, dtype=losses.dtype)
        (weights * losses).sum().backward()
        mismatch = (result.logprobs.detach(), values["rollout"].to(result.logprobs.dtype))
        return sum_micro_batch(weights=weights, surrogate=surrogate, losses=losses, kl=kl, entropies=result.entropies, mismatch=mismatch)

    def _with_kl(self, surrogate: Surrogate, logprobs: Tensor, values: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        algorithm = self._config.algorithm
        if "ref" not in values:
            return surrogate.losses, torch.zeros_like(logprobs)
        kl = kl_estimate(logprobs, base_logprobs=values["ref"].to(logprobs.dtype), estimator=algorithm.kl_estimator)
        return surrogate.losses + algorithm.kl_coefficient * kl, kl

    def step(self) -> StepFigures:
        """Reduce, normalise, clip, update; see `TrainerBackend`."""
        try:
            totals, mismatch_max = gather_totals(self._micro_batches, ranks=self._ranks, step=self.policy_version)
            grad_norm = self._reduced_grad_norm(totals)
        except RunFailed:
            self._drop_accumulated()
            raise
        learning_rate = scheduled_learning_rate(self._config.trainer, step=self.policy_version, num_steps=self._config.run.num_steps)
        self._flat.update(learning_rate=learning_rate, gradient_scale=min(1.0, self._config.trainer.max_grad_norm / (grad_norm + 1e-6)))
        self._micro_batches = []
        self.policy_version += 1
        return _figures(totals, mismatch_max=mismatch_max, grad_norm=grad_norm, learning_rate=learning_rate)

    def _reduced_grad_norm(self, totals: Totals) -> float:
        if not totals.num_loss_tokens:
            raise RunFailed(f"train step {self.policy_version} holds no loss token on any rank; do its samples have completions?")
        self._ranks.all_reduce(self._flat.gradients)
        grad_norm = self._flat.normalise_gradients(totals.num_units)
        if not math.isfinite(grad_norm):
            raise RunFailed(
                f"train step {self.policy_version}: the gradient's norm must be finite, got {grad_norm} over all ranks; "
                "the weights are those before the step; lower trainer.learning_rate"
            )
        return grad_norm

    def _drop_accumulated(self) -> None:
        self._micro_batches = []
        self._flat.zero_gradients()

    def weights(self) -> dict[str, Tensor]:
        """Snapshot the weights on the CPU, tied tensors once; see `TrainerBackend`."""
        return {name: parameter.detach().to("cpu", copy=True) for name, parameter in self._model.module.named_parameters()}

    def state(self) -> TrainerState:
        """Show weights in master precision, AdamW's moments and generators; see `TrainerBackend`."""
        generators = {"rng.torch": torch.get_rng_state()}
        if self._model.device.type == "cuda":
            generators["rng.cuda"] = torch.cuda.get_rng_state(self._model.device)
        return TrainerState(policy_version=self.policy_version, tensors=self._flat.tensors() | generators)

    def load_state(self, state: TrainerState) -> None:
        """Go on from a state; see `TrainerBackend`. A generator of a device that is not here is passed over."""
        tensors = dict(state.tensors)
        generators = {name: tensors.pop(name) for name in list(tensors) if name.startswith("rng.")}
        self._flat.load(tensors)
        self._micro_batches = []
        self.policy_version = state.policy_version
        if "rng.torch" in generators:
            torch.set_rng_state(generators["rng.torch"].cpu())
        if "rng.cuda" in generators and self._model.device.type == "cuda":
            torch.cuda.set_rng_state(generators["rng.cuda"].cpu(), self._model.device)

    @staticmethod
    def open_scorer(config: RunConfig) -> Scorer:
        """Load the initial model for scoring alone; see `TrainerBackend`."""
        from relax_events.training.scoring import LogprobScorer  # which sets the process up as this file does

        model, trainer = config.model, config.trainer
        return LogprobScorer(model.path, model=model, threads=trainer.threads, max_tokens=trainer.max_tokens_per_micro_batch)


def scheduled_learning_rate(trainer: TrainerConfig, *, step: int, num_steps: int) -> float:
    """Return the learning rate of a step.

    Args:
        trainer: Peak rate, warm-up and schedule.
        step: From 0.
        num_steps: Steps of the run; later steps, of a run that was extended, go on at the last rate.
    """
    warmup = min(1.0, (step + 1) / max(1, trainer.warmup_steps))
    if trainer.schedule == "constant":
        return trainer.learning_rate * warmup
    left = (num_steps - min(step, num_steps - 1)) / max(1, num_steps - trainer.warmup_steps)
    return trainer.learning_rate * min(warmup, left)


def make_deterministic(device: torch.device, *, threads: int) -> None:
    """Fix what torch leaves open: the number of threads, and on the CPU the kernels. Holds for the process.

    Args:
        device: Kernels are fixed on the CPU alone; on a GPU this would refuse some and slow others.
        threads: CPU threads; 0 leaves the choice to torch.
    """
    if threads:
        torch.set_num_threads(threads)
    if device.type == "cpu":
        torch.use_deterministic_algorithms(True)
        # Filling costs a pass over each new tensor, and nothing here reads one before it is written.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # set through a module class


def _figures(totals: Totals, *, mismatch_max: float, grad_norm: float, learning_rate: float) -> StepFigures:
    units, tokens = totals.num_units, totals.num_loss_tokens
    return StepFigures(
        loss=totals.loss / units,
        policy_loss=totals.policy_loss / units,
        kl_estimate=totals.kl_estimate / units,
        entropy=totals.entropy / tokens,
        clip_low_fraction=totals.clip_low / tokens,
        clip_high_fraction=totals.clip_high / tokens,
        clip_fraction=(totals.clip_low + totals.clip_high) / tokens,
        mean_ratio=totals.ratio / tokens,
        mismatch_kl=totals.mismatch_kl / tokens,
        mismatch_max_abs=mismatch_max,
        grad_norm=grad_norm,
        learning_rate=learning_rate,
        num_loss_tokens=int(tokens),
        num_tokens=int(totals.num_tokens),
        num_samples=int(totals.num_samples),
    )
