"""Losses on the same numbers, ours and TRL's own functions: `python -m benchmarks.loss_kernels`, in
TRL's environment.

Prints JSON: for each kernel the seconds of either side by repetition, and how much the results
differ.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from trl import GRPOTrainer

from relax_events.algorithms.objective import Objective, ObjectiveInputs
from relax_events.config import AlgorithmConfig
from relax_events.training.backend.step_sums import sum_micro_batch

NUM_SAMPLES, MEDIAN_TOKENS, MAX_TOKENS = 256, 300, 2048
LENGTHS = {"equal": 0.0, "with a tail": 1.0}
"""Deviation of the logarithm of the samples' lengths."""
NUM_REPEATS = 15
CLIP = {"epsilon_low": 0.2, "epsilon_high": 0.2, "importance_sampling_level": "token"}


@dataclass(frozen=True, slots=True)
class LossKernel:
    """A loss under our name with its settings, and TRL's words for the same."""

    name: str
    ours: Mapping[str, Any]
    theirs: Mapping[str, Any]


LOSSES = (
    LossKernel("grpo, token mean", {"name": "grpo"}, {"loss_type": "dapo"}),
    LossKernel(
        "grpo, sample mean", {"name": "grpo", "aggregation": "sample_mean"}, {"loss_type": "grpo"}
    ),
    LossKernel("dapo", {"name": "dapo"}, {"loss_type": "dapo", "epsilon_high": 0.28}),
    LossKernel(
        "dr_grpo", {"name": "dr_grpo", "length_normaliser": MAX_TOKENS}, {"loss_type": "dr_grpo"}
    ),
    LossKernel(
        "gspo",
        {"name": "gspo", "clip_low": 0.01, "clip_high": 0.01},
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon_low": 0.01,
            "epsilon_high": 0.01,
        },
    ),
    LossKernel("sapo", {"name": "sapo"}, {"loss_type": "sapo"}),
    LossKernel("cispo", {"name": "cispo"}, {"loss_type": "cispo", "epsilon_high": 5.0}),
)


@dataclass
class Numbers:
    """Log-probabilities of a step's samples, packed for us and padded for TRL."""

    lengths: Tensor
    logprobs: Tensor
    old_logprobs: Tensor
    entropies: Tensor
    advantages: Tensor
    mask: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.mask = torch.arange(int(self.lengths.max())) < self.lengths[:, None]

    @classmethod
    def sample(cls, sigma: float) -> Numbers:
        """Draw lengths, all equal or with a tail, and policies that are a little apart; the same
        each time."""
        chance = np.random.default_rng(0)
        lengths = np.clip(
            chance.lognormal(np.log(MEDIAN_TOKENS), sigma, NUM_SAMPLES), 8, MAX_TOKENS
        ).astype(np.int64)
        logprobs = -chance.exponential(1.0, lengths.sum()).astype(np.float32)
        old = logprobs + chance.normal(0, 0.15, len(logprobs)).astype(np.float32)
        entropies, advantages = (
            chance.uniform(0, 2, len(logprobs)).astype(np.float32),
            chance.normal(0, 1, NUM_SAMPLES).astype(np.float32),
        )
        return cls(
            *(torch.from_numpy(array) for array in (lengths, logprobs, old, entropies, advantages))
        )

    def padded(self, values: Tensor) -> Tensor:
        """Put packed values side by side."""
        laid = values.new_zeros(self.mask.shape)
        laid[self.mask] = values
        return laid

    @cached_property
    def trl_inputs(self) -> dict[str, Tensor]:
        """What TRL's loss is given besides the trained policy's log-probabilities."""
        num_samples, mask = len(self.lengths), self.mask.int()
        return {
            "prompt_ids": torch.zeros(num_samples, 1, dtype=torch.long),
            "prompt_mask": torch.ones(num_samples, 1, dtype=torch.int),
            "completion_ids": torch.zeros(self.mask.shape, dtype=torch.long),
            "completion_mask": mask,
            "advantages": self.advantages,
            "old_per_token_logps": self.padded(self.old_logprobs),
            "num_items_in_batch": mask.sum(),
        }


class TrlLoss(GRPOTrainer):
    """TRL's loss without its trainer: as much of the latter's state as the loss reads, and
    log-probabilities that are there already."""

    def __init__(
        self, numbers: Numbers, settings: Mapping[str, Any]
    ) -> None:  # TRL's own would load a model
        chosen = {"loss_type": "dapo", **CLIP, **settings}
        for name, value in chosen.items():
            setattr(self, name, value)
        self.args = SimpleNamespace(
            delta=None,
            steps_per_generation=1,
            report_to=[],
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
        )
        self.accelerator = SimpleNamespace(
            num_processes=1,
            is_main_process=False,
            reduce=lambda values, **_: values,
            gather=lambda values: values,
        )
        self.model, self.state = SimpleNamespace(training=True), SimpleNamespace(global_step=0)
        self.aux_loss_enabled = self.use_vllm = self._entropy_bonus_enabled = False
        self.top_entropy_quantile, self.off_policy_mask_threshold, self.beta = 1.0, None, 0.0
        self.current_gradient_accumulation_steps, self.max_completion_length = 1, MAX_TOKENS
        self._metrics = {"train": defaultdict(list)}
        self.logprobs = numbers.padded(numbers.logprobs).requires_grad_()
        self._entropies = numbers.padded(numbers.entropies)

    def _get_per_token_logps_and_entropies(self, *_: Any, **__: Any) -> tuple[Tensor, Tensor, None]:
        return self.logprobs, self._entropies, None


def our_loss(numbers: Numbers, settings: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Give loss and gradient of packed tokens as the trainer computes them, its metrics
    included."""
    algorithm = AlgorithmConfig.model_validate(settings)
    objective = Objective(algorithm, max_new_tokens=MAX_TOKENS)
    logprobs = numbers.logprobs.clone().requires_grad_()
    inputs = ObjectiveInputs(
        logprobs=logprobs,
        entropies=numbers.entropies,
        rollout_logprobs=numbers.old_logprobs,
        old_logprobs=numbers.old_logprobs,
        ref_logprobs=None,
        advantages=numbers.advantages.repeat_interleave(numbers.lengths),
        num_loss_tokens=numbers.lengths,
    )
    tokens = objective(inputs)
    loss = (tokens.token_weights * tokens.losses).sum() / objective.num_units(numbers.lengths)
    loss.backward()
    sum_micro_batch(tokens, inputs)
    assert logprobs.grad is not None
    return loss.detach(), logprobs.grad


def trl_loss(numbers: Numbers, settings: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Give loss and gradient of padded tokens as TRL computes them, its metrics included."""
    kernel = TrlLoss(numbers, settings)
    loss = kernel.compute_loss(None, numbers.trl_inputs)
    loss.backward()
    assert kernel.logprobs.grad is not None
    return loss.detach(), kernel.logprobs.grad


def timed(sides: Mapping[str, Callable[[], Any]], num_repeats: int) -> dict[str, list[float]]:
    """Call all sides in turn; return the seconds of each, the first, warming turn left out."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(num_repeats + 1):
        for name, call in sides.items():
            started = time.perf_counter()
            call()
            if repeat:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def measure_loss(
    kernel: LossKernel, numbers: Numbers, num_repeats: int, *, lengths: str
) -> dict[str, Any]:
    """Time a loss on both sides, and report how much loss and gradients differ."""
    ours, our_gradient = our_loss(numbers, kernel.ours)
    theirs, their_gradient = trl_loss(numbers, kernel.theirs)
    apart = (our_gradient - their_gradient[numbers.mask]).abs().max() / our_gradient.abs().max()
    sides = {
        "ours": partial(our_loss, numbers, kernel.ours),
        "TRL": partial(trl_loss, numbers, kernel.theirs),
    }
    return {
        "kernel": kernel.name,
        "lengths": lengths,
        "num_items": int(numbers.lengths.sum()),
        "num_padded": numbers.mask.numel(),
        "seconds": timed(sides, num_repeats),
        "loss_apart": float(abs(ours - theirs) / abs(theirs)),
        "gradient_apart": float(apart),
    }


def main() -> None:
    """Measure everything on one thread and print it."""
    torch.set_num_threads(1)
    sampled = {name: Numbers.sample(sigma) for name, sigma in LENGTHS.items()}
    losses = [
        measure_loss(kernel, numbers, NUM_REPEATS, lengths=name)
        for kernel in LOSSES
        for name, numbers in sampled.items()
    ]
    print(json.dumps(losses))


if __name__ == "__main__":
    main()
