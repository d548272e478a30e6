"""The program of each rank in test_ranks: runs every scenario; rank 0 writes the results."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import safetensors.torch
import torch

from relax_events.errors import RelaxError
from relax_events.objects import ObjectStore
from relax_events.training.backend.torch_backend import TorchBackend
from relax_events.training.backend.weight_stream import collect_weights
from relax_events.training.batch.packing import micro_batch_slices
from relax_events.training.checkpoint.checkpoints import Checkpoints
from relax_events.training.distributed import open_ranks
from tests.event_samples import changed
from tests.unit.trainer_samples import make_samples, run_config

SPLITS = {"even": (0.0, 0.5, 1.0), "uneven": (0.0, 0.2, 1.0), "one_idle": (0.0, 1.0, 1.0)}
PLAIN = {"kl_coefficient": 0.1, "aggregation": "sample_mean"}
REJECTION = {"rejection": "k2", "rejection_over": "max", "rejection_high": 0.06, "veto_high": 1.4}
WHOLE_STEP = {
    "name": "reinforce_plus_plus_baseline",
    "m2_threshold": 0.05,
    "old_logprobs": "trainer",
    "correction": "icepop",
} | REJECTION


def train(ranks, model_path, bounds, algorithm=PLAIN):
    """Train three steps, each rank on its part of the samples; return all metrics, and the
    weights."""
    config = run_config(model_path, algorithm=algorithm, trainer={"max_grad_norm": 0.5})
    backend = TorchBackend(config, ranks=ranks, dtype=torch.float64)
    all_metrics = []
    for step in range(3):
        samples = make_samples(12, seed=step, model_path=model_path)
        start, end = (int(share * len(samples)) for share in bounds[ranks.rank : ranks.rank + 2])
        mine = samples[start:end]
        for part in micro_batch_slices([len(sample.tokens) for sample in mine], max_tokens=50):
            backend.accumulate(mine[part])
        all_metrics.append(backend.step().to_metrics())
    return all_metrics, collect_weights(backend)


def use_collectives(ranks):
    """Use every collective, and report what each rank received."""
    received = {
        "gathered": ranks.all_gather(np.array([[ranks.rank, 10]], np.int32)).tolist(),
        "floats": ranks.all_gather(np.array([ranks.rank + 0.5])).tolist(),
        "bytes": [data.hex() for data in ranks.all_gather_bytes(b"\x00\xff" * ranks.rank)],
        "empty": [data.hex() for data in ranks.all_gather_bytes(b"")],
        "broadcast": ranks.broadcast(b"abc" if ranks.rank == 1 else None, source=1).decode(),
        "broadcast_empty": ranks.broadcast(b"" if ranks.rank == 0 else None).decode(),
    }
    return [json.loads(text) for text in ranks.all_gather_bytes(json.dumps(received).encode())]


def diverge(ranks, model_path):
    """Give rank 1 alone a sample that breaks the loss, so that all skip; report what each rank
    raised, and how many samples the next step has."""
    backend = TorchBackend(run_config(model_path), ranks=ranks)
    samples = make_samples(4, seed=1, model_path=model_path)
    far = np.where(samples[3].loss_mask, np.float32(3e38), np.float32(0))
    backend.accumulate([samples[0] if ranks.rank == 0 else changed(samples[3], advantages=far)])
    raised = ""
    try:
        backend.step()
    except RelaxError as error:
        raised = str(error)
        backend.skip_step()
    backend.accumulate(samples)
    num_samples = backend.step().num_samples
    return [text.decode() for text in ranks.all_gather_bytes(raised.encode())], num_samples


def save(ranks, folder):
    """Train a step and save a checkpoint from all ranks; return the reference as each saw it, and
    the state."""
    backend = TorchBackend(run_config(folder / "model"), ranks=ranks)
    backend.accumulate(make_samples(4, seed=1, model_path=folder / "model"))
    backend.step()
    with Checkpoints(
        ObjectStore.open((folder / "objects").as_uri()), ranks=ranks, keep=1
    ) as checkpoints:
        reference = checkpoints.save(backend.state(), extra={"rank": ranks.rank}).wait(30)
    mine = f"{reference.policy_version} {reference.uri} {reference.digest.hex()}"
    return [data.decode() for data in ranks.all_gather_bytes(mine.encode())], {
        name: tensor.clone() for name, tensor in backend.state().tensors.items()
    }


def lose_a_rank(ranks):
    """End rank 1 silently; return what rank 0 raised."""
    if ranks.rank == 1:
        os._exit(0)
    try:
        ranks.all_gather(np.zeros(1))
    except RelaxError as error:
        return str(error)
    return "nothing was raised"


def main(folder):
    """Run every scenario; the last one loses a rank."""
    with open_ranks(timeout_seconds=30.0) as ranks:
        results, tensors = {}, {}
        for name, bounds in SPLITS.items():
            results[name], tensors[name] = train(ranks, folder / "model", bounds)
            results[f"{name}_whole"], tensors[f"{name}_whole"] = train(
                ranks, folder / "model", bounds, WHOLE_STEP
            )
        results["collectives"] = use_collectives(ranks)
        results["diverge"] = diverge(ranks, folder / "model")
        results["save"], tensors["save"] = save(ranks, folder)
        results["lose_a_rank"] = lose_a_rank(ranks)
        for name, values in tensors.items():
            safetensors.torch.save_file(values, folder / f"{name}.safetensors")
        (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
