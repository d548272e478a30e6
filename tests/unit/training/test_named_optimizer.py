"""Optimizers that the run file names, against the same class over a plain module."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch import nn

from relax_events.config import TrainerConfig
from relax_events.errors import ConfigError, WeightsError
from relax_events.models.optimizers import measure_state_bytes
from relax_events.training.backend.flat_parameters import FlatParameters
from relax_events.training.backend.state import TrainerState

pytestmark = pytest.mark.unit
LION = """
import torch


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            slow, fast = group["betas"]
            for one in group["params"]:
                state = self.state[one]
                state["count"] = state.get("count", 0) + 1
                mean = state.setdefault("mean", torch.zeros_like(one))
                one.mul_(1 - group["lr"] * group["weight_decay"])
                one.sub_(group["lr"] * (slow * mean + (1 - slow) * one.grad).sign())
                mean.mul_(fast).add_(one.grad, alpha=1 - fast)


class ForGPUs(Lion):
    def step(self):
        raise RuntimeError("needs a GPU")


class Nothing:
    def __init__(self, params, lr):
        pass
"""


def config_of(name: str, **options: Any) -> TrainerConfig:
    return TrainerConfig(
        learning_rate=0.1, optimizer=name, optimizer_options=options, weight_decay=0.1
    )


def module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))


def train(mine: FlatParameters, net: nn.Module, steps: range) -> None:
    for step in steps:
        torch.manual_seed(step)
        net(torch.randn(5, 4)).square().sum().backward()
        mine.update(learning_rate=0.1, gradient_scale=0.5)


def train_plainly(made: torch.optim.Optimizer, net: nn.Module, num_steps: int) -> None:
    for step in range(num_steps):
        torch.manual_seed(step)
        net(torch.randn(5, 4)).square().sum().backward()
        for parameter in net.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)
        made.step()
        made.zero_grad()


def groups(net: nn.Module) -> list[dict[str, Any]]:
    matrices = [one for one in net.parameters() if one.ndim == 2]
    vectors = [one for one in net.parameters() if one.ndim == 1]
    return [
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0},
    ]


@pytest.mark.parametrize(
    ("name", "options"),
    [("sgd", {"momentum": 0.9, "nesterov": True}), ("adafactor", {}), ("lion", {})],
)
def test_steps_equal_the_class_over_a_plain_module_also_after_a_restart(
    tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    made, expected = module(), module()
    (tmp_path / "lion.py").write_text(LION)
    scope: dict[str, Any] = {}
    exec(LION, scope)  # the same class for the expected steps
    kinds: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "sgd": lambda parts: torch.optim.SGD(parts, lr=0.1, **options),
        "adafactor": lambda parts: torch.optim.Adafactor(parts, lr=0.1),
        "lion": lambda parts: scope["Lion"](parts, lr=0.1, betas=(0.9, 0.95)),
    }
    named = f"{tmp_path / 'lion.py'}:Lion" if name == "lion" else name
    config = config_of(named, **options)
    mine = FlatParameters(made, config=config)
    train(mine, made, range(2))
    state = TrainerState(
        policy_version=2, tensors={key: one.clone() for key, one in mine.tensors().items()}
    )
    train(mine, made, range(2, 4))
    train_plainly(kinds[name](groups(expected)), expected, 4)
    for one, other in zip(made.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one, other)

    resumed = module()
    again = FlatParameters(resumed, config=config)
    again.load(state)
    train(again, resumed, range(2, 4))
    for one, other in zip(resumed.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one, other)


def test_state_of_another_optimizer_is_refused() -> None:
    adamw = FlatParameters(module(), config=TrainerConfig(learning_rate=0.1))
    sgd = FlatParameters(module(), config=config_of("sgd"))
    state = TrainerState(policy_version=0, tensors=adamw.tensors())
    with pytest.raises(WeightsError, match=r"exp_avg"):
        sgd.load(state)
    odd = sgd.tensors() | {"optimizer.step.0": torch.zeros(())}
    with pytest.raises(WeightsError, match="must be the one that the checkpoint was written with"):
        sgd.load(TrainerState(policy_version=0, tensors=odd))


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("sdg", {}, r"'sdg' is not installed; installed are .*did you mean sgd\?"),
        ("sgd", {"momentun": 0.9}, "unexpected keyword argument 'momentun'; set trainer.optimizer"),
        ("sgd", {"momentum": -1.0}, "Invalid momentum value: -1.0"),
        ("nothing", {}, "must be a torch.optim.Optimizer, got Nothing"),
    ],
)
def test_optimizer_that_cannot_be_made_is_named(
    tmp_path: Path, name: str, options: dict[str, Any], says: str
) -> None:
    (tmp_path / "own.py").write_text(LION)
    if name == "nothing":
        name = f"{tmp_path / 'own.py'}:Nothing"
    with pytest.raises(ConfigError, match=says):
        FlatParameters(module(), config=config_of(name, **options))


def test_options_and_divided_parameters_are_refused_with_the_run_file() -> None:
    with pytest.raises(ValueError, match="are for another optimizer than 'adamw'"):
        TrainerConfig(optimizer_options={"momentum": 0.9})
    with pytest.raises(ValueError, match=r"trainer.backend = 'megatron' divides them"):
        TrainerConfig(optimizer="sgd", backend="megatron")
    with pytest.raises(ValueError, match=r"trainer.sharding = 'full' divides them"):
        TrainerConfig(optimizer="sgd", sharding="full", ranks=2)


@pytest.mark.parametrize(
    ("name", "options", "num_bytes"),
    [
        ("sgd", {}, 0),
        ("sgd", {"momentum": 0.9}, 4),
        ("adafactor", {}, 2 * 256 * 4 / 256**2),  # a row and a column
        ("torch", {}, 8),
        ("torch", {"amsgrad": True}, 12),
        ("lion", {}, 4),
    ],
)
def test_state_of_an_optimizer_is_measured(
    tmp_path: Path, name: str, options: dict[str, Any], num_bytes: float
) -> None:
    (tmp_path / "lion.py").write_text(LION)
    (tmp_path / "torch.py").write_text("from torch.optim import AdamW")
    named = {"lion": f"{tmp_path / 'lion.py'}:Lion", "torch": f"{tmp_path / 'torch.py'}:AdamW"}
    assert measure_state_bytes(config_of(named.get(name, name), **options)) == num_bytes


def test_optimizer_that_can_not_step_here_counts_like_adamw(tmp_path: Path) -> None:
    (tmp_path / "lion.py").write_text(LION)
    with capture_logs() as logs:
        assert measure_state_bytes(config_of(f"{tmp_path / 'lion.py'}:ForGPUs")) == 8
    assert [(one["event"], "needs a GPU" in one["error"]) for one in logs] == [
        ("optimizer.not_measured", True)
    ]
