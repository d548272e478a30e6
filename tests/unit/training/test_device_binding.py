"""Each process that computes makes its GPU the current one before it loads anything: FSDP2, NCCL and
kernels take the current device, and that is GPU 0 in a process that never chose.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from relax_events.config import RunConfig
from relax_events.engines.transformers import causal_model
from relax_events.errors import ConfigError, EnvironmentProblem
from relax_events.models.causal_lm import open_device
from relax_events.packages.megatron.opening import open_rank_device
from relax_events.training.backend import scoring, sharded_parameters, torch_backend, torch_critic
from relax_events.training.backend.scoring import LogprobScorer
from relax_events.training.backend.torch_backend import TorchBackend
from relax_events.training.backend.torch_critic import TorchCritic
from relax_events.training.ranks import SingleRank
from tests.unit.trainer_samples import run_config, tiny_model

pytestmark = pytest.mark.unit


class LoadBegun(Exception):
    """A model would be loaded now."""


class SecondRank(SingleRank):
    """Rank 2 of a machine with 4 GPUs."""

    local_rank = 2


@pytest.fixture
def current_devices(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Return the devices that were made the current one, of a machine with 4 GPUs."""
    devices: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    return devices


def on_gpus() -> RunConfig:
    config = run_config(algorithm={"name": "ppo"})
    return config.model_copy(update={"model": config.model.model_copy(update={"device": "auto"})})


def open_backend(config: RunConfig) -> None:
    TorchBackend(config, ranks=SecondRank())


def open_critic(config: RunConfig) -> None:
    TorchCritic(config, ranks=SecondRank())


def open_scorer(config: RunConfig) -> None:
    LogprobScorer(tiny_model(), model=config.model, threads=1, max_tokens=64)


def open_engine(config: RunConfig) -> None:
    causal_model.CausalModel(tiny_model(), config=config.model)


@pytest.mark.parametrize(
    ("opener", "index"),
    [(open_backend, 2), (open_critic, 2), (open_scorer, 0), (open_engine, 0)],
)
def test_device_is_the_current_one_before_a_model_is_loaded(
    opener: Callable[[RunConfig], None],
    index: int,
    current_devices: list[torch.device],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def begin(*_: object, **__: object) -> None:
        raise LoadBegun

    for module, name in (
        (torch_backend, "PolicyModel"),
        (scoring, "PolicyModel"),
        (torch_critic, "ValueModel"),
        (causal_model, "load_causal_lm"),
    ):
        monkeypatch.setattr(module, name, begin)
    with pytest.raises(LoadBegun):
        opener(on_gpus())
    assert current_devices == [torch.device("cuda", index)]


def test_rank_of_megatron_binds_its_device(current_devices: list[torch.device]) -> None:
    device = open_rank_device("cuda", ranks=SecondRank(), threads=1)
    assert [device] == current_devices == [torch.device("cuda", 2)]


def test_cpu_is_bound_to_nothing(current_devices: list[torch.device]) -> None:
    assert open_device("cpu") == torch.device("cpu")
    with pytest.raises(ConfigError, match="asks for a GPU that is not available"):
        open_device("cuda", local_rank=4)
    assert current_devices == []


def test_what_was_not_sharded_onto_the_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the message of a rank whose shards lie on another GPU."""
    module = nn.Linear(2, 2)
    text = r"weight was not sharded onto cuda:1, this rank's device, but lies on cpu; give each"
    with pytest.raises(EnvironmentProblem, match=text):
        sharded_parameters._require_shards(module, torch.device("cuda", 1))
    assert not isinstance(module.weight, DTensor)
