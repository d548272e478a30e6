"""Train steps on a GPU: results of the CPU, in every way to train that needs no second GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from relax_events.config import LoRAConfig, RunConfig
from relax_events.packages.examples.tiny_models import make_tiny
from relax_events.packages.megatron.backend import MegatronBackend
from relax_events.training.backend.protocol import TrainerBackend
from relax_events.training.backend.torch_backend import TorchBackend
from relax_events.training.backend.weight_stream import collect_weights
from relax_events.training.distributed import TorchRanks
from relax_events.training.ranks import Ranks, SingleRank
from tests.float64_experts import use_float64_experts
from tests.folders import kept_folder
from tests.unit.trainer_samples import make_samples, run_config

ALGORITHM = {"kl_coefficient": 0.1, "old_logprobs": "actor", "entropy_coefficient": 0.01}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "recomputed": {"activation_checkpointing": "whole"},
    "selective": {"activation_checkpointing": "selective"},
    "host": {"offload_optimizer": True},
    "mini_batches": {"num_mini_batches": 2, "num_epochs": 2},
}


class ShardedBackend(TorchBackend):
    """Shards over one rank too: there is no second GPU."""

    def _is_sharded(self) -> bool:
        return True


def require_shards(backend: TorchBackend) -> None:
    """Require that each parameter is sharded, on the GPU."""
    parameters = list(backend._model.module.parameters())
    assert parameters
    assert all(isinstance(one, DTensor) and one.to_local().is_cuda for one in parameters)


@pytest.fixture(autouse=True)
def float64_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute experts in float64 too."""
    use_float64_experts(monkeypatch)


@cache
def model_of(family: str) -> Path:
    """Write a tiny random model once."""
    return make_tiny(
        kept_folder(f"gpu-{family}"), corpus=["12=21"], family=family, hidden_size=32, seed=3
    )


def config_on(device: str, config: RunConfig, *, lora: bool = False) -> RunConfig:
    """Return a run file whose model is on a device."""
    changes = {"device": device} | ({"lora": LoRAConfig(rank=4)} if lora else {})
    return config.model_copy(update={"model": config.model.model_copy(update=changes)})


def train(backend: TrainerBackend, path: Path) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Train three steps; return their metrics, and the weights after them."""
    metrics = []
    for number in range(3):
        samples = make_samples(12, seed=number, model_path=path)
        for first in (0, 8):
            backend.accumulate(samples[first : first + 8])
        metrics.append(backend.step().to_metrics())
    return metrics, {name: tensor.cpu() for name, tensor in collect_weights(backend).items()}


def assert_near(expected: Any, found: Any, *, tolerance: float) -> None:
    """Compare what `train` returned. AdamW's steps are as long for a gradient of rounding as for any
    other, so that few weights, and metrics of later steps, may be further apart.
    """
    for number, (ours, theirs) in enumerate(zip(expected[0], found[0], strict=True)):
        allowed = tolerance if number == 0 else max(1e-3, 10 * tolerance)
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            assert theirs[name] == pytest.approx(value, rel=allowed, abs=allowed), (number, name)
    assert expected[1].keys() == found[1].keys()
    ours, theirs = (
        torch.cat([tensors[name].double().flatten() for name in sorted(tensors)])
        for tensors in (expected[1], found[1])
    )
    assert (ours - theirs).norm() < max(1e-3, 10 * tolerance) * ours.norm()


@contextmanager
def one_rank(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    """Join a group of one rank over NCCL."""
    values = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_PORT": 0}
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with TorchRanks(timeout_seconds=60.0, lay_out=config.trainer.topology) as ranks:
        yield ranks


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("way", WAYS)
def test_step_equals_that_of_a_cpu(way: str, family: str) -> None:
    path = model_of(family)
    config = run_config(path, trainer=WAYS[way], algorithm=ALGORITHM)
    found = [
        train(
            TorchBackend(config_on(device, config), ranks=SingleRank(), dtype=torch.float64), path
        )
        for device in ("cpu", "cuda")
    ]
    assert_near(*found, tolerance=1e-5)


def test_adapters_equal_those_of_a_cpu() -> None:
    path = model_of("qwen3")
    config = run_config(path, algorithm=ALGORITHM)
    found = [
        train(
            TorchBackend(
                config_on(device, config, lora=True), ranks=SingleRank(), dtype=torch.float64
            ),
            path,
        )
        for device in ("cpu", "cuda")
    ]
    assert_near(*found, tolerance=1e-5)


@pytest.mark.parametrize("trainer", [{}, {"share_prompts": False}, {"offload_optimizer": True}])
def test_bfloat16_stays_near_float32(trainer: dict[str, Any]) -> None:
    path, found = model_of("qwen3"), []
    for dtype in ("float32", "bfloat16"):
        config = run_config(path, trainer=trainer, algorithm=ALGORITHM, dtype=dtype)
        backend = TorchBackend(config_on("cuda", config), ranks=SingleRank())
        found.append(train(backend, path)[0])
    for expected, rounded in zip(*found, strict=True):
        assert rounded["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.1)
        assert rounded["loss"] == pytest.approx(expected["loss"], rel=0.1, abs=0.05)


@pytest.mark.parametrize("way", ["plain", "recomputed"])
def test_sharded_rank_over_nccl(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = model_of("qwen3")
    trainer = WAYS[way] | {"sharding": "full"}
    config = config_on("cuda", run_config(path, trainer=trainer, algorithm=ALGORITHM))
    plain = config_on("cuda", run_config(path, trainer=WAYS[way], algorithm=ALGORITHM))
    with one_rank(config, monkeypatch) as ranks:
        backend = ShardedBackend(config, ranks=ranks, dtype=torch.float64)
        require_shards(backend)
        found = train(backend, path)
    expected = train(TorchBackend(plain, ranks=SingleRank(), dtype=torch.float64), path)
    assert_near(expected, found, tolerance=1e-5)


@pytest.mark.filterwarnings("ignore")  # of megatron's own imports
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("way", ["plain", "recomputed", "host"])
def test_megatron_rank_over_nccl(way: str, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = model_of(family)
    trainer = WAYS[way] | {"backend": "megatron"}
    config = config_on("cuda", run_config(path, trainer=trainer, algorithm=ALGORITHM))
    plain = config_on("cuda", run_config(path, trainer=WAYS[way], algorithm=ALGORITHM))
    with one_rank(config, monkeypatch) as ranks:
        found = train(MegatronBackend(config, ranks=ranks), path)
    expected = train(TorchBackend(plain, ranks=SingleRank()), path)
    assert_near(expected, found, tolerance=1e-4)
