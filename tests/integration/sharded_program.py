"""The program of each rank in test_sharded_training: trains a model sharded over two ranks, saves
it, and loads what one rank saved; rank 0 writes the results, and trains alone for comparison."""

import mmap
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from relax_events.config import LoRAConfig
from relax_events.engines.protocol import GeneratedSample, GenerationRequest
from relax_events.events.parts import FinishReason, Modality
from relax_events.events.types import SampleReady
from relax_events.media.library import MediaLibrary
from relax_events.objects import ObjectStore
from relax_events.training.backend.torch_backend import TorchBackend
from relax_events.training.backend.weight_stream import collect_weights
from relax_events.training.checkpoint.checkpoints import Checkpoints
from relax_events.training.distributed import open_ranks
from relax_events.training.ranks import Ranks, SingleRank
from tests.float64_experts import use_float64_experts
from tests.unit.image_model import (
    build_image_model,
    image_run,
    prompt_of,
    ready,
    request_about,
    request_for,
)
from tests.unit.trainer_samples import make_samples, route_by_tokens, run_config
from tests.unit.video_and_audio import BOUNDS, KINDS, item_of, media_run, omni_model

SHARDED = {"sharding": "full", "ranks": 2, "max_grad_norm": 0.5}
SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "plain": {},
    "whole": {"trainer": {"activation_checkpointing": "whole"}},
    "selective": {"trainer": {"activation_checkpointing": "selective"}},
    "mini_batches": {
        "trainer": {"num_epochs": 2, "num_mini_batches": 2},
        "algorithm": {"old_logprobs": "trainer"},
    },
    "host": {"trainer": {"offload_optimizer": True}},
    "balanced": {
        "folder": {"name": "experts"},
        "algorithm": {"load_balancing_coefficient": 0.1},
        "trainer": {"activation_checkpointing": "whole"},
    },
    "adapters": {"lora": {"rank": 4}, "trainer": {"offload_optimizer": True}},
    "adapters_leave": {"lora": {"rank": 4}, "leaves": {}},
    "mini_batches_leave": {
        "trainer": {"num_epochs": 2, "num_mini_batches": 2},
        "algorithm": {"old_logprobs": "trainer"},
        "leaves": {},
    },
    "passes": {"trainer": {"max_tokens_per_micro_batch": 24}},
    "replayed": {"folder": {"name": "experts"}, "model": {"routing_replay": "rollout"}},
    "replayed_whole": {
        "folder": {"name": "experts"},
        "model": {"routing_replay": "rollout"},
        "trainer": {"activation_checkpointing": "whole"},
    },
    "adapters_whole": {
        "lora": {"rank": 4},
        "trainer": {"activation_checkpointing": "whole"},
    },
}
MEDIA_SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "images": {},
    "frozen_tower": {"model": {"frozen": ["vision"]}},
    "image_adapters": {"model": {"lora": {"rank": 4}}},
    "omni": {},
    "omni_whole": {"trainer": {"activation_checkpointing": "whole"}},
}
SEEN: dict[int, tuple[Modality, ...]] = {
    0: (Modality.IMAGE,),
    1: (Modality.AUDIO, Modality.VIDEO),
    2: (),
    3: (Modality.VIDEO, Modality.IMAGE, Modality.AUDIO),
    4: (Modality.AUDIO,),
}
"""Media of the prompt groups of `omni`, by number."""


def train(ranks: Ranks, folder: Path, sections: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Train two steps, of which this rank has its share; return metrics and weights."""
    path = folder / sections.get("folder", {}).get("name", "model")
    config = run_config(
        path,
        trainer=SHARDED | sections.get("trainer", {}),
        algorithm=sections.get("algorithm"),
    )
    if "lora" in sections:
        model = config.model.model_copy(update={"lora": LoRAConfig(**sections["lora"])})
        config = config.model_copy(update={"model": model})
    model = config.model.model_copy(update=sections.get("model", {}))
    config = config.model_copy(update={"model": model})
    backend = TorchBackend(config, ranks=ranks, dtype=torch.float64)
    metrics = []
    for step in range(2):
        samples = make_samples(10, seed=step, model_path=path)
        if backend.experts is not None:
            samples = [route_by_tokens(sample, backend.experts) for sample in samples]
        size = 2 + 2 * ranks.rank  # ranks with other numbers of micro-batches
        groups = [samples[first : first + 2] for first in range(0, 10, 2)]
        mine = [sample for group in groups[ranks.rank :: ranks.size] for sample in group]
        for first in range(0, len(mine), size):
            backend.accumulate(mine[first : first + size])
        if "leaves" in sections:
            leave_and_return(backend)
        metrics.append(backend.step().to_metrics())
        if "leaves" in sections:
            leave_and_return(backend)
    return {"metrics": metrics, "weights": collect_weights(backend), "backend": backend}


def leave_and_return(backend: TorchBackend) -> None:
    """Leave the device to others for a moment; small tensors have no whole page to free."""
    state = backend.state()
    held = [*state.tensors.values(), *(shard.tensor for shard in state.shards)]
    largest = max(held, key=torch.numel)
    before = largest.clone()
    assert backend.move_away() > 0
    if largest.nbytes > 2 * mmap.PAGESIZE:
        assert not torch.equal(largest, before), "its pages are gone"
    backend.bring_back()
    assert torch.equal(largest, before)


def train_on_media(
    ranks: Ranks, folder: Path, name: str, sections: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """Train two steps on prompt groups with media and without; in the second step one rank has none
    at all.
    """
    is_omni, own = name.startswith("omni"), folder / f"media{ranks.size}{ranks.rank}"
    sections = sections | {"trainer": SHARDED | sections.get("trainer", {})}
    config = (
        media_run(own, omni_model(), sections=sections) if is_omni else image_run(own, **sections)
    )
    backend = TorchBackend(config, ranks=ranks, dtype=torch.float64)
    library = MediaLibrary(config)
    metrics = []
    for numbers in ([1, 0, 4, 2], [1, 2, 3, 2]):
        for number in numbers[ranks.rank :: ranks.size]:
            request = omni_request(number, library) if is_omni else request_for(number, library)
            backend.accumulate([answered(request, index) for index in range(2)])
        metrics.append(backend.step().to_metrics())
    return {"metrics": metrics, "weights": collect_weights(backend), "backend": backend}


def omni_request(number: int, library: MediaLibrary) -> GenerationRequest:
    """Request a prompt group about files of several kinds."""
    references = [
        library.add(item_of(kind, KINDS[kind][0], seed=10 * number + index))
        for index, kind in enumerate(SEEN[number])
    ]
    media = tuple(library.load(reference) for reference in references)
    request = request_about(number, ())
    prompt = prompt_of(media, path=omni_model(), bounds=BOUNDS)
    return replace(request, media=media, prompt_tokens=prompt)


def answered(request: GenerationRequest, index: int) -> SampleReady:
    """Return a sample of a prompt group with tokens of no engine."""
    generator = np.random.default_rng([len(request.prompt_tokens), index])
    generated = GeneratedSample(
        sample_id=f"{request.prompt_group_id}/{index}",
        prompt_group_id=request.prompt_group_id,
        tokens=generator.integers(5, 200, 6).astype(np.int32),
        logprobs=np.full(6, -5.0, np.float32),
        segments=(),
        finish_reason=FinishReason.LENGTH,
    )
    sample = ready(request, generated, index)
    return replace(sample, advantages=sample.advantages * np.float32(1 - 3 * index))


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
    use_float64_experts(pytest.MonkeyPatch())
    for make_model in (build_image_model, omni_model):
        make_model()  # before there are ranks, of which only the first would write files
    with open_ranks(timeout_seconds=120.0) as ranks:
        store = ObjectStore.open((folder / "objects").as_uri())
        for name, sections in SETTINGS.items():
            results[name] = train(ranks, folder, sections)
            if ranks.rank == 0:
                results[f"{name}_alone"] = train(SingleRank(), folder, sections)
        for name, sections in MEDIA_SETTINGS.items():
            results[name] = train_on_media(ranks, folder, name, sections)
            if ranks.rank == 0:
                results[f"{name}_alone"] = train_on_media(SingleRank(), folder, name, sections)
        again = train(ranks, folder, {"leaves": {}})
        results["again"] = again
        adapted = results["adapters"]["backend"].state()
        results["adapter_shards"] = [shard.name for shard in adapted.shards]
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
