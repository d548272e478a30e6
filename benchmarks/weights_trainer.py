"""A trainer that takes a given time for a step, as the timed one does, and has weights of a real
size."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.timed_trainer import TimedBackend
from relax_events.config import RunConfig
from relax_events.training.backend.protocol import StepMetrics
from relax_events.training.backend.weight_stream import split_into_buckets
from relax_events.training.ranks import Ranks

NUM_TENSORS, NUM_VALUES = 16, 1 << 20


class HeavyBackend(TimedBackend):
    """64 MiB of weights, all of which change in each step."""

    def __init__(self, config: RunConfig, *, ranks: Ranks) -> None:
        super().__init__(config, ranks=ranks)
        self._tensors = {
            f"layers.{number}.weight": torch.zeros(NUM_VALUES) for number in range(NUM_TENSORS)
        }

    def step(self) -> StepMetrics:
        """Wait for the devices, and change the weights."""
        metrics = super().step()
        for tensor in self._tensors.values():
            tensor += 1.0
        return metrics

    def weight_buckets(self, *, max_bytes: int) -> Iterator[dict[str, Tensor]]:
        """Yield them, as backend `torch` does on one rank; the caller copies what it keeps."""
        for names in split_into_buckets(self._tensors, max_bytes=max_bytes):
            yield {name: self._tensors[name] for name in names}
