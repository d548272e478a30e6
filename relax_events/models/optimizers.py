"""Optimizers that a run file names (`trainer.optimizer`): any class with the interface of
torch.optim.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import structlog
import torch
from torch import Tensor, nn

from relax_events.config import TrainerConfig
from relax_events.errors import ConfigError
from relax_events.planning.inventory import ADAMW_BYTES
from relax_events.plugins import OPTIMIZERS, find_plugin

log = structlog.get_logger(__name__)
PROBE_WIDTH, PROBE_RATE = 256, 1e-6
"""Of the matrix on which the memory of a state is measured, and the learning rate of its steps."""


def make_optimizer(
    config: TrainerConfig, parameters: Sequence[nn.Parameter]
) -> torch.optim.Optimizer:
    """Make an optimizer of parameters: matrices with weight decay, vectors without.

    Args:
        config: Its name, options, learning rate, betas, epsilon and weight decay.
        parameters: What it updates in place.
    Raises:
        ConfigError: There is none of that name, or it can't be made with these options.
    """
    what = f"trainer.optimizer = {config.optimizer!r}"
    kind: Any = find_plugin(OPTIMIZERS, config.optimizer, what=what).load()
    parts = (
        ([one for one in parameters if one.ndim >= 2], config.weight_decay),
        ([one for one in parameters if one.ndim < 2], 0.0),
    )
    groups = [{"params": params, "weight_decay": decay} for params, decay in parts if params]
    settings = _find_shared_settings(kind, config) | config.optimizer_options
    try:
        optimizer = kind(groups, lr=config.learning_rate, **settings)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{what} can't be made: {error}; set trainer.optimizer_options, or take another"
        ) from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"{what} must be a torch.optim.Optimizer, got {type(optimizer).__name__}; take another"
        )
    return optimizer


def measure_state_bytes(config: TrainerConfig) -> float:
    """Return the bytes of state that an optimizer keeps for each element of a large matrix, after
    two steps on a small one in float32. An optimizer that can't take a step here, such as a class
    for GPUs alone, counts like AdamW, with a warning.

    A state of rows and columns, as Adafactor's, counts a little more than in a larger matrix.

    Raises:
        ConfigError: As `make_optimizer`.
    """
    shape = (PROBE_WIDTH, PROBE_WIDTH)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    matrix = nn.Parameter(torch.full(shape, 0.5, device=device))
    matrix.grad = torch.full(shape, 0.25, device=device)
    config = config.model_copy(update={"learning_rate": PROBE_RATE})  # it may not be derived yet
    optimizer = make_optimizer(config, [matrix])
    try:
        for _ in range(2):
            optimizer.step()
    except Exception as error:  # a plugin's code may raise anything
        log.warning("optimizer.not_measured", optimizer=config.optimizer, error=repr(error))
        return ADAMW_BYTES
    tensors = [value for value in optimizer.state[matrix].values() if isinstance(value, Tensor)]
    return sum(tensor.nbytes for tensor in tensors if tensor.ndim) / matrix.numel()


def _find_shared_settings(kind: Any, config: TrainerConfig) -> dict[str, Any]:
    """Return `betas` and `eps`, if a class takes them in this form, as its defaults show."""
    parameters = inspect.signature(kind).parameters
    shared: dict[str, Any] = {"betas": config.betas, "eps": config.eps}
    return {
        name: value
        for name, value in shared.items()
        if name in parameters and _is_like(parameters[name].default, value)
    }


def _is_like(default: object, value: object) -> bool:
    if isinstance(default, tuple) and isinstance(value, tuple):
        return len(default) == len(value)
    return type(default) is type(value)
