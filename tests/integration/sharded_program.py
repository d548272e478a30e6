"""The program of each rank in test_sharded_training: trains a model sharded over two ranks, saves
it, and loads what one rank saved; rank 0 writes the results, and trains alone for comparison."""

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from relax_events.objects import ObjectStore
from relax_events.training.backend.torch_backend import TorchBackend
from relax_events.training.backend.weight_stream import collect_weights
from relax_events.training.checkpoint.checkpoints import Checkpoints
from relax_events.training.distributed import open_ranks
from relax_events.training.ranks import Ranks, SingleRank
from tests.unit.trainer_samples import make_samples, run_config

SHARDED = {"sharding": "full", "ranks": 2, "max_grad_norm": 0.5}
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "whole": ({"activation_checkpointing": "whole"}, {}),
    "selective": ({"activation_checkpointing": "selective"}, {}),
    "mini_batches": ({"num_epochs": 2, "num_mini_batches": 2}, {"old_logprobs": "trainer"}),
}


def train(
    ranks: Ranks, folder: Path, trainer: dict[str, Any], algorithm: dict[str, Any]
) -> dict[str, Any]:
    """Train two steps, of which this rank has its share; return metrics, weights and gradients."""
    config = run_config(folder / "model", trainer=SHARDED | trainer, algorithm=algorithm)
    backend = TorchBackend(config, ranks=ranks, dtype=torch.float64)
    metrics = []
    for step in range(2):
        samples = make_samples(10, seed=step, model_path=folder / "model")
        size = 2 + 2 * ranks.rank  # ranks with other numbers of micro-batches
        groups = [samples[first : first + 2] for first in range(0, 10, 2)]
        mine = [sample for group in groups[ranks.rank :: ranks.size] for sample in group]
        for first in range(0, len(mine), size):
            backend.accumulate(mine[first : first + size])
        metrics.append(backend.step().to_metrics())
    return {"metrics": metrics, "weights": collect_weights(backend), "backend": backend}


def count_bytes(backend: TorchBackend) -> tuple[int, int]:
    """Return this rank's bytes of weights, gradients and moments, and the model's parameters."""
    shards = backend.state().shards
    held = sum(shard.tensor.nbytes for shard in shards)
    gradients = sum(shard.tensor.nbytes for shard in shards if shard.name.startswith("exp_avg_sq."))
    whole = {shard.name: shard.global_shape for shard in shards if shard.name[:6] == "model."}
    return held + gradients, sum(torch.Size(shape).numel() for shape in whole.values())


def gather_state(backend: TorchBackend, checkpoints: Checkpoints) -> dict[str, Tensor]:
    """Save a checkpoint, and return it whole."""
    reference = checkpoints.save(backend.state(), extra={}).wait(60)
    return checkpoints.load(reference).state.tensors


def main(folder: Path) -> None:
    """Run every scenario."""
    results: dict[str, Any] = {}
    with open_ranks(timeout_seconds=120.0) as ranks:
        store = ObjectStore.open((folder / "objects").as_uri())
        for name, (trainer, algorithm) in SETTINGS.items():
            results[name] = train(ranks, folder, trainer, algorithm)
            if ranks.rank == 0:
                results[f"{name}_alone"] = train(SingleRank(), folder, trainer, algorithm)
        again = train(ranks, folder, *SETTINGS["plain"])
        results["again"] = again
        backend = results["plain"]["backend"]
        results["bytes"] = count_bytes(backend)
        with Checkpoints(store, ranks=ranks, keep=5) as checkpoints:
            results["saved"] = gather_state(backend, checkpoints)
            alone = TorchBackend(
                run_config(folder / "model"), ranks=SingleRank(), dtype=torch.float64
            )
            with Checkpoints(store, ranks=SingleRank(), keep=5, folder=f"own{ranks.rank}/") as own:
                # on one rank and back, through files of both layouts
                reference = checkpoints.save(backend.state(), extra={}).wait(60)
                alone.load_state(checkpoints.load(reference).state)
                results["on_one_rank"] = collect_weights(alone)
                back = own.save(alone.state(), extra={}).wait(60)
                again["backend"].load_state(own.load(back).state)
            results["back"] = gather_state(again["backend"], checkpoints)
    if ranks.rank == 0:
        for value in results.values():
            if isinstance(value, dict):
                value.pop("backend", None)
        torch.save(results, folder / "results.pt")


if __name__ == "__main__":
    warnings.simplefilter("error", FutureWarning)
    main(Path(sys.argv[1]))
