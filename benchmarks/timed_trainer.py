"""A trainer backend that takes the time of the paper's and learns nothing, and the scorer that goes
with it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.profiles import Timing
from relax_events.config import RunConfig
from relax_events.events.types import SampleReady, SampleRolledOut
from relax_events.training.backend.protocol import IdsOf, SampleScores, StepMetrics
from relax_events.training.backend.state import StateSource, TrainerState
from relax_events.training.ranks import Ranks
from relax_events.weights.manifest import Weights

VOCAB_SIZE = 1 << 20
NUM_WEIGHTS = 1 << 12
MEANS = tuple(
    item.name
    for item in fields(StepMetrics)
    if item.name != "algorithm_metrics" and not item.name.startswith("num_")
)


class TimedBackend:
    """Implements `training.protocol.TrainerBackend`."""

    def __init__(self, config: RunConfig, *, ranks: Ranks) -> None:
        """Read the speed from the model folder's `workload.json`."""
        del ranks
        self.policy_version = 0
        self._timing = Timing.read(config.model.path)
        self._weights = torch.zeros(NUM_WEIGHTS)
        self._device_free_at = 0.0
        self._num_samples = self._num_tokens = self._num_loss_tokens = 0

    @property
    def vocab_size(self) -> int:
        """Bound of the token ids, above the tokenizer's ids."""
        return VOCAB_SIZE

    @property
    def experts(self) -> None:
        """Nothing: no token is sent anywhere."""

    def accumulate(self, micro_batch: Sequence[SampleReady]) -> None:
        """Queue forward and backward on the devices, as kernels are, and return once all but this
        are done."""
        tokens = sum(num_completion_tokens(sample) for sample in micro_batch)
        switch = 0.0 if self._num_samples else self._timing.to_train_seconds
        self._await_device()
        self._occupy(
            switch + tokens * self._timing.lengths.record_divisor * self._timing.train_token_seconds
        )
        self._num_samples += len(micro_batch)
        self._num_loss_tokens += tokens
        self._num_tokens += sum(len(np.asarray(sample.tokens)) for sample in micro_batch)

    def check(self, micro_batch: Sequence[SampleReady]) -> None:
        """Take what only the critic learns from."""

    def discard(self) -> None:
        """Forget what was queued; the devices have spent the time on it."""
        self._num_samples = self._num_tokens = self._num_loss_tokens = 0

    def on_progress(self, report_progress: Callable[[], None]) -> None:
        """Report none: a step waits in one piece."""

    def skip_step(self) -> None:
        """Forget what was queued, and count up."""
        self.discard()
        self.policy_version += 1

    def step(self) -> StepMetrics:
        """Wait for what is queued and for the update, and count up."""
        self._occupy(self._timing.update_seconds)
        self._await_device()
        self.policy_version += 1
        self._weights = torch.full((NUM_WEIGHTS,), float(self.policy_version))
        metrics = StepMetrics(
            **dict.fromkeys(MEANS, 0.0),
            num_loss_tokens=self._num_loss_tokens,
            num_tokens=self._num_tokens,
            num_samples=self._num_samples,
            num_rejected_by_veto=0,
            num_rejected_by_divergence=0,
        )
        self.discard()
        return metrics

    def _occupy(self, seconds: float) -> None:
        self._device_free_at = (
            max(self._device_free_at, time.monotonic()) + seconds * self._timing.time_scale
        )

    def _await_device(self) -> None:
        time.sleep(max(self._device_free_at - time.monotonic(), 0.0))

    def weight_buckets(self, *, max_bytes: int) -> Iterator[dict[str, Tensor]]:
        """Give a small tensor that differs from version to version."""
        yield {"weight": self._weights.clone()}

    def state(self) -> TrainerState:
        """Show the same."""
        return TrainerState(
            policy_version=self.policy_version, tensors={"model.weight": self._weights}
        )

    def load_state(self, state: StateSource) -> None:
        """Go on from a state."""
        self.policy_version = state.policy_version
        self._weights = state.read("model.weight").clone()
        self._num_samples = self._num_tokens = self._num_loss_tokens = 0

    @staticmethod
    def open_scorer(config: RunConfig) -> TimedScorer:
        """Open a scorer for one of the forward roles."""
        return TimedScorer(Timing.read(config.model.path))


class TimedScorer:
    """Implements `training.protocol.Scorer`."""

    def __init__(self, timing: Timing) -> None:
        """Take the speed of the forward roles."""
        self._timing = timing

    def score(self, samples: Sequence[SampleRolledOut]) -> list[NDArray[np.float32]]:
        """Sleep for as long as the forward passes take."""
        tokens = sum(num_completion_tokens(sample) for sample in samples)
        time.sleep(
            tokens
            * self._timing.lengths.record_divisor
            * self._timing.forward_token_seconds
            * self._timing.time_scale
        )
        return [np.zeros(len(np.asarray(sample.tokens)), np.float32) for sample in samples]

    def score_topk(
        self, samples: Sequence[SampleRolledOut], *, num_ids: int, ids_of: IdsOf
    ) -> list[SampleScores]:
        """Sleep as long: the ids come off the same logits."""
        scores = []
        for sample, logprobs in zip(samples, self.score(samples), strict=True):
            width = 2 * num_ids if ids_of == "both" else num_ids
            ids = np.zeros((int(np.asarray(sample.loss_mask).sum()), width), np.int32)
            scores.append(
                SampleScores(logprobs, None if ids_of == "sample" else ids, ids.astype(np.float32))
            )
        return scores

    def load_weights(self, weights: Weights) -> None:
        """Take note of nothing."""


def num_completion_tokens(sample: SampleReady | SampleRolledOut) -> int:
    """Return the tokens that the time is charged for."""
    return len(np.asarray(sample.tokens)) - sample.num_prompt_tokens
