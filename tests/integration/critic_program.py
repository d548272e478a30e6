"""The program of each rank in test_critic_ranks: trains a critic that two ranks hold together in
several layouts, one after the other. Rank 0 writes the results, and trains alone by backend `torch`
for comparison."""

import sys
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from relax_events.config import RunConfig
from relax_events.errors import OutOfMemory
from relax_events.events.types import SampleReady
from relax_events.objects import ObjectStore
from relax_events.packages.megatron.critic import MegatronCritic
from relax_events.training.backend.out_of_memory import PassMemory
from relax_events.training.backend.torch_critic import TorchCritic
from relax_events.training.backend.value_training import ValueTraining
from relax_events.training.checkpoint.checkpoints import Checkpoints
from relax_events.training.distributed import TorchRanks
from relax_events.training.ranks import SingleRank
from tests.event_samples import changed
from tests.integration.megatron_media import media_samples, reads_media, with_media
from tests.integration.megatron_program import (
    SMALL_PASSES,
    TIMEOUT_SECONDS,
    Float64Reference,
    lay_out,
    record_cells,
    state_of,
)
from tests.unit.trainer_samples import make_samples, run_config


@dataclass(frozen=True)
class Scenario:
    """A layout, and what is trained in it."""

    layout: dict[str, int] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    family: str = "qwen3"
    backend: str = "megatron"


DEVICES = (40, 20), (1, 16)
"""A budget of a pass and what fits the device, in cells: the longest path has 20."""
MINI_BATCHES = {"num_epochs": 2, "num_mini_batches": 2}
SCENARIOS = {
    "tensor": Scenario({"tensor": 2}, {"activation_checkpointing": "whole"}),
    "pipeline": Scenario({"pipeline": 2}, family="tied"),
    "chunks": Scenario({"pipeline": 2, "chunks": 2}, family="deep"),
    "context": Scenario({"context": 2}),
    "data": Scenario({}, MINI_BATCHES),
    "experts": Scenario({"expert": 2}, family="qwen3_moe"),
    "vision": Scenario({"tensor": 2}, family="qwen3_vl"),
    "passes_pipeline": Scenario({"pipeline": 2}, SMALL_PASSES, family="tied"),
    "passes_chunks": Scenario({"pipeline": 2, "chunks": 2}, SMALL_PASSES, family="deep"),
    "passes_tensor": Scenario({"tensor": 2}, SMALL_PASSES | {"activation_checkpointing": "whole"}),
    "sharded": Scenario({}, MINI_BATCHES | {"activation_checkpointing": "whole"}, backend="torch"),
}


def samples_of(config: RunConfig, step: int) -> list[SampleReady]:
    """Return a step's samples, with values."""
    draw = np.random.default_rng(step)
    path = config.model.path
    samples = (
        media_samples(config, 10, seed=step)
        if reads_media(path)
        else make_samples(10, seed=step, model_path=path)
    )
    return [
        changed(
            sample,
            values=np.where(sample.loss_mask, draw.normal(0, 0.1, len(sample.tokens)), 0).astype(
                np.float32
            ),
        )
        for sample in samples
    ]


def train(critic: ValueTraining, samples: list[SampleReady]) -> dict[str, float]:
    """Train a step, and return its metrics."""
    for first in range(0, 10, 4):
        critic.accumulate(samples[first : first + 4])
    metrics = critic.step()
    return {name: getattr(metrics, name) for name in metrics.__slots__}


def learn(
    critic: ValueTraining, checkpoints: Checkpoints, samples: list[list[SampleReady]]
) -> dict[str, Any]:
    """Train two steps, then the second one again from a checkpoint of the first."""
    found: dict[str, Any] = {"metrics": [train(critic, samples[0])]}
    first = checkpoints.save(critic.state(), extra={}).wait(60)
    found["first"] = state_of(checkpoints, first)
    found["metrics"].append(train(critic, samples[1]))
    found["scores"] = critic.score(samples[2])
    critic.load_state(checkpoints.load(first).state)
    found["metrics"].append(train(critic, samples[1]))
    found["scores_again"] = critic.score(samples[2])
    found["reference"] = first
    return found


def run(name: str, folder: Path, ranks: TorchRanks) -> dict[str, Any]:
    """Train in a layout, and on rank 0 alone; each loads what the other saved."""
    scenario, store = SCENARIOS[name], ObjectStore.open((folder / "objects").as_uri())
    model = folder / scenario.family
    lay_out(ranks, scenario.layout)
    plain = run_config(
        model,
        trainer={"max_grad_norm": 0.5, "weight_decay": 0.01, "max_tokens_per_micro_batch": 90}
        | {key: value for key, value in scenario.trainer.items() if key[:4] == "num_"},
        algorithm={"name": "ppo"},
    )
    if reads_media(model):
        plain = with_media(plain, folder / "media")
    trainer = plain.trainer.model_copy(update=scenario.trainer)
    config = plain.model_copy(update={"trainer": trainer})
    samples = [samples_of(plain, step) for step in range(3)]
    make: Any = MegatronCritic if scenario.backend == "megatron" else TorchCritic
    critic = make(config, ranks=ranks, dtype=torch.float64)
    cells = record_cells(critic) if isinstance(critic, MegatronCritic) else []
    with Checkpoints(store, ranks=ranks, keep=9, folder=f"{name}/") as checkpoints:
        found = learn(critic, checkpoints, samples)
        saved = checkpoints.load(found.pop("reference")).state
    folder_alone = f"{name}-alone-{ranks.rank}/"
    with Checkpoints(store, ranks=SingleRank(), keep=9, folder=folder_alone) as own:
        alone = TorchCritic(plain, dtype=torch.float64)
        expected = learn(alone, own, samples)
        expected.pop("reference")
        alone.load_state(saved)
        back = own.save(alone.state(), extra={}).wait(60)
        critic.load_state(own.load(back).state)
    with Checkpoints(store, ranks=ranks, keep=9, folder=f"{name}-back/") as checkpoints:
        reference = checkpoints.save(critic.state(), extra={}).wait(60)
        found["back"] = state_of(checkpoints, reference)
    results = {"found": found, "expected": expected, "cells": list(cells)}
    if name == "passes_tensor":
        critic.load_state(saved)
        results["too_large"] = [
            name_what_does_not_fit(critic, samples[0], max_cells, device_cells, way)
            for max_cells, device_cells in DEVICES
            for way in ("forward", "backward", "score")
        ]
    return results


class Limited(torch.autograd.Function):
    """A device that may lack the memory for a pass."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, fits_forward: bool, fits_backward: bool) -> Tensor:
        """Return the hidden states, if there is memory for them."""
        ctx.fits_backward = fits_backward
        if not fits_forward:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        """Return the gradient, if there is memory for it."""
        if not ctx.fits_backward:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return gradient, None, None


def name_what_does_not_fit(
    critic: MegatronCritic,
    samples: list[SampleReady],
    max_cells: int,
    device_cells: int,
    way: str,
) -> tuple[int, int, bool]:
    """Return the paths, the cells and the sample of the pass that the critic names; all ranks run
    out of memory at once."""
    stage: Any = critic._model
    run = stage._hidden

    def run_on_device(row: Any, chunk: Any) -> Any:
        fits = len(row.tokens) <= device_cells
        return Limited.apply(run(row, chunk), fits or way == "backward", fits or way != "backward")

    stage._hidden = run_on_device
    stage._memory = PassMemory()  # a path that fitted before is not to blame
    critic.max_cells = max_cells
    lengths = {sample.sample_id: len(sample.tokens) for sample in samples}
    try:
        critic.score(samples) if way == "score" else train(critic, samples)
    except OutOfMemory as error:
        critic.discard()
        return error.num_paths, error.num_cells, lengths[error.sample_id] == error.num_cells
    finally:
        stage._hidden = run
    raise AssertionError("it fitted")


def main(folder: Path, names: list[str]) -> None:
    """Run scenarios."""
    ranks = TorchRanks(timeout_seconds=TIMEOUT_SECONDS)
    with Float64Reference():
        results = {name: run(name, folder, ranks) for name in names}
    if ranks.rank == 0:
        torch.save(results, folder / "results.pt")
    ranks.close()


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # of what megatron-core finds no GPU package for
    main(Path(sys.argv[1]), sys.argv[2:])
