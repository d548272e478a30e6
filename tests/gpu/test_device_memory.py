"""Memory of a GPU: models that leave it and come back, and optimizers on the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_requests import finish, make_engine, make_request, step

from relax_events.config import RunConfig
from relax_events.engines.transformers.engine import TransformersEngine
from relax_events.models.offload import Offload
from relax_events.packages.examples.tiny_models import make_tiny
from relax_events.training.backend.torch_backend import TorchBackend
from relax_events.training.ranks import SingleRank
from tests.unit.trainer_samples import make_samples, run_config

WIDTH = 512
WORKSPACES = 2**26
"""Bytes that cuBLAS keeps between its calls, on a Hopper GPU."""


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model of about 10 million parameters."""
    return make_tiny(
        tmp_path_factory.mktemp("wide") / "model", corpus=["12=21"], hidden_size=WIDTH, seed=3
    )


def on_gpu(config: RunConfig, folder: Path, *, time_share: bool = False) -> RunConfig:
    """Return a run file with its model on the GPU, and its files in a folder."""
    return config.model_copy(
        update={
            "model": config.model.model_copy(update={"device": "cuda"}),
            "devices": config.devices.model_copy(update={"time_share": time_share}),
            "run": config.run.model_copy(update={"directory": folder}),
        }
    )


def used_bytes() -> int:
    """Return the bytes of the GPU that are not free."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


def test_memory_leaves_the_device_and_comes_back(tmp_path: Path) -> None:
    generator = torch.Generator("cuda").manual_seed(1)
    large = torch.randn(2**28, device="cuda", generator=generator)
    view, gone = large[1000:2000], torch.ones(2**26, device="cuda")
    expected, full = large.clone().cpu(), used_bytes()
    offload = Offload(tmp_path)
    moved = offload.move_away([large, view], dropped=[gone])
    assert moved == large.nbytes + gone.nbytes
    assert full - used_bytes() >= moved
    offload.bring_back()
    assert torch.cuda.memory_allocated() >= moved
    assert torch.equal(large.cpu(), expected)
    assert torch.equal(view.cpu(), expected[1000:2000])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_trainer_leaves_the_device(dtype: str, wide_model: Path, tmp_path: Path) -> None:
    config = on_gpu(run_config(wide_model, dtype=dtype), tmp_path, time_share=True)
    backend = TorchBackend(config, ranks=SingleRank())
    samples = make_samples(8, seed=4, model_path=wide_model)
    backend.accumulate(samples[:4])
    before = {name: tensor.clone().cpu() for name, tensor in backend.state().tensors.items()}
    allocated, full = torch.cuda.memory_allocated(), used_bytes()
    moved = backend.move_away()
    assert moved > 0.95 * (allocated - WORKSPACES), "nothing else of size is held"
    assert full - used_bytes() > 0.9 * moved
    backend.bring_back()
    after = backend.state().tensors
    assert all(torch.equal(tensor, after[name].cpu()) for name, tensor in before.items())
    backend.accumulate(samples[4:])
    assert backend.step().to_metrics()["grad_norm"] > 0


def test_optimizer_on_the_host_leaves_room(wide_model: Path, tmp_path: Path) -> None:
    peaks: list[int] = []
    for offloaded in (False, True):
        trainer: dict[str, Any] = {"offload_optimizer": offloaded}
        config = on_gpu(run_config(wide_model, trainer=trainer, dtype="bfloat16"), tmp_path)
        backend = TorchBackend(config, ranks=SingleRank())
        num_parameters = sum(one.numel() for one in backend._model.module.parameters())
        for seed in range(2):
            torch.cuda.reset_peak_memory_stats()
            backend.accumulate(make_samples(4, seed=seed, model_path=wide_model))
            backend.step()
        peaks.append(torch.cuda.max_memory_allocated())
        del backend
        torch.cuda.empty_cache()
    assert peaks[0] - peaks[1] > 11 * num_parameters, "masters and moments: 12 bytes a parameter"


def test_engine_without_its_weights_continues_with_the_same_tokens(
    wide_model: Path, tmp_path: Path
) -> None:
    def open_engine() -> TransformersEngine:
        return make_engine(wide_model, model={"device": "cuda"})

    undisturbed, sleeper = open_engine(), open_engine()
    sleeper.offload_to(tmp_path)
    for engine in (undisturbed, sleeper):
        engine.submit(make_request(1, max_new_tokens=12))
        step(engine, 3)
    size = sum(one.nbytes for one in sleeper._model._module.parameters())
    full = used_bytes()
    sleeper.sleep()
    assert full - used_bytes() > 0.9 * size
    sleeper.wake()
    expected, found = finish(undisturbed), finish(sleeper)
    assert {name: sample.tokens.tolist() for name, sample in found.items()} == {
        name: sample.tokens.tolist() for name, sample in expected.items()
    }
