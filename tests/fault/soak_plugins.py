"""The trainer and the engine of a soaked run. They act as usual until a file in the run's folder
triggers a fault:

    slow_step         the trainer's next call of the method that the file names is delayed by its seconds
    dies.<worker id>  the worker dies once for each byte of the file; with `always`, at every start
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import psutil
from torch import Tensor

from relax_events.engines.protocol import GeneratedSample
from relax_events.engines.transformers.engine import TransformersEngine
from relax_events.events.types import SampleReady
from relax_events.training.backend.protocol import StepMetrics
from relax_events.training.backend.torch_backend import TorchBackend

SLOW_STEP = "slow_step"
ALWAYS = "always"
ERROR = "the soak has it die"


def deaths_of(worker_id: str) -> str:
    """Return the name of the file that lets a worker die."""
    return f"dies.{worker_id}"


@cache
def this_worker() -> str:
    """Return the id of the worker that this process is."""
    words = psutil.Process().cmdline()
    return f"{words[words.index('worker') + 1]}-{words[words.index('--index') + 1]}"


def die_if_commanded(worker_id: str) -> None:
    """Raise an error that ends the worker, if a file in the run's folder requests it, and count it there first."""
    path = Path(deaths_of(worker_id))
    if not path.exists():
        return
    if path.read_text() != ALWAYS:
        os.truncate(path, path.stat().st_size - 1)
        if not path.stat().st_size:
            path.unlink()
    raise RuntimeError(ERROR)


class SoakedEngine(TransformersEngine):
    """Dies while it generates on command."""

    def poll(self, *, timeout_seconds: float) -> list[GeneratedSample]:
        """Decode as usual."""
        if self.num_running:
            die_if_commanded(this_worker())
        return super().poll(timeout_seconds=timeout_seconds)


class SoakedTrainer(TorchBackend):
    """Dies or takes long in a step on command."""

    def accumulate(self, micro_batch: Sequence[SampleReady]) -> None:
        """Train a micro-batch as usual."""
        die_if_commanded("trainer-0")
        self._linger("accumulate")
        super().accumulate(micro_batch)

    def step(self) -> StepMetrics:
        """Step the optimizer as usual."""
        self._linger("step")
        return super().step()

    def weight_buckets(self, *, max_bytes: int) -> Iterator[dict[str, Tensor]]:
        """Copy the weights as usual."""
        self._linger("weights")
        yield from super().weight_buckets(max_bytes=max_bytes)

    def _linger(self, call: str) -> None:
        path = Path(SLOW_STEP)
        if not path.exists():
            return
        reported, seconds = path.read_text().split()
        if reported == call:
            path.unlink()  # once, also when this process is killed meanwhile
            time.sleep(float(seconds))
