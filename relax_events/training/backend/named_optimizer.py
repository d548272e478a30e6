"""An optimizer that the run file names (`trainer.optimizer`): any class with the interface of
torch.optim, over whole parameters in master precision.

    class(parameter groups, lr, ...)      matrices with weight decay, vectors without
    its state                             saved by parameter; its numbers as tensors
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import structlog
import torch
from torch import Tensor, nn

from relax_events.config import TrainerConfig
from relax_events.errors import ConfigError, WeightsError
from relax_events.planning.inventory import ADAMW_BYTES
from relax_events.plugins import OPTIMIZERS, find_plugin
from relax_events.training.backend.state import StateSource

log = structlog.get_logger(__name__)
PREFIX = "optimizer."
PROBE_WIDTH, PROBE_RATE = 256, 1e-6
"""Of the matrix on which the memory of a state is measured, and the learning rate of its steps."""
TENSOR, NUMBER, TRUTH, WHOLE = "tensor", "number", "truth", "whole"
"""Kinds of a value in an optimizer's state."""
DTYPES = {NUMBER: torch.float64, TRUTH: torch.bool, WHOLE: torch.int64}


class NamedOptimizer:
    """See the module's docstring."""

    def __init__(
        self,
        values: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        *,
        config: TrainerConfig,
    ) -> None:
        """Make the optimizer.

        Args:
            values: What it updates in place, by parameter.
            gradients: What it reads.
            config: Its name, options, betas, epsilon and weight decay.
        Raises:
            ConfigError: There is none of that name, or it can't be made with these options.
        """
        self._parameters = {name: nn.Parameter(value) for name, value in values.items()}
        for name, parameter in self._parameters.items():
            parameter.grad = gradients[name]
        self._names: dict[Tensor, str] = {
            parameter: name for name, parameter in self._parameters.items()
        }
        self._optimizer = self._make(config)

    def _make(self, config: TrainerConfig) -> torch.optim.Optimizer:
        what = f"trainer.optimizer = {config.optimizer!r}"
        kind: Any = find_plugin(OPTIMIZERS, config.optimizer, what=what).load()
        parts = (
            ([one for one in self._parameters.values() if one.ndim >= 2], config.weight_decay),
            ([one for one in self._parameters.values() if one.ndim < 2], 0.0),
        )
        groups = [{"params": params, "weight_decay": decay} for params, decay in parts if params]
        given = _shared_settings(kind, config) | config.optimizer_options
        try:
            made = kind(groups, lr=config.learning_rate, **given)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{what} can't be made: {error}; set trainer.optimizer_options, or take another"
            ) from error
        if not isinstance(made, torch.optim.Optimizer):
            raise ConfigError(
                f"{what} must be a torch.optim.Optimizer, got {type(made).__name__}; take another"
            )
        return made

    def step(self, *, learning_rate: float) -> None:
        """Update the values."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()

    def memory(self) -> list[Tensor]:
        """Return the tensors of its state."""
        return [tensor for kind, _, _, tensor in self._items() if kind == TENSOR]

    def tensors(self) -> dict[str, Tensor]:
        """Return its state: `optimizer.<kind>.<key>.<parameter>`. Empty before the first step."""
        return {f"{PREFIX}{kind}.{key}.{name}": one for kind, key, name, one in self._items()}

    def _items(self) -> Iterator[tuple[str, str, str, Tensor]]:
        for parameter, state in self._optimizer.state.items():
            for key, value in state.items():
                if value is None:
                    continue
                kind = _kind_of(value)
                tensor = value if kind == TENSOR else torch.tensor(value, dtype=DTYPES[kind])
                yield kind, key, self._names[parameter], tensor

    def expected(self, saved: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Return what a state has of an optimizer: it differs from step to step, and `load` checks
        it.
        """
        return {name: shape for name, shape in saved.items() if name.startswith(PREFIX)}

    def load(self, state: StateSource) -> None:
        """Take over what `tensors` returned.

        Raises:
            WeightsError: The state is another optimizer's; nothing was changed.
        """
        found: dict[Tensor, dict[str, Any]] = {}
        for full in (name for name in state.shapes if name.startswith(PREFIX)):
            kind, _, rest = full.removeprefix(PREFIX).partition(".")
            key, _, name = rest.partition(".")
            if kind not in (TENSOR, *DTYPES) or name not in self._parameters:
                raise WeightsError(
                    f"{full} is not of this optimizer's state; trainer.optimizer must be the one "
                    "that the checkpoint was written with"
                )
            parameter = self._parameters[name]
            value = state.read(full)
            # as torch.optim has it, what is counted in a tensor stays on the CPU
            device = parameter.device if value.ndim else value.device
            kept = value.to(device, copy=True) if kind == TENSOR else value.item()
            found.setdefault(parameter, {})[key] = kept
        self._optimizer.state.clear()
        self._optimizer.state.update(found)


def measure_state_bytes(config: TrainerConfig) -> float:
    """Return the bytes of state that an optimizer keeps for each element of a large matrix, after
    two steps on a small one in float32. One that can't take a step here, such as a class for GPUs
    alone, counts like AdamW, with a warning.

    A state of rows and columns, as Adafactor's, counts a little more than in a larger matrix.

    Raises:
        ConfigError: As `NamedOptimizer`.
    """
    shape = (PROBE_WIDTH, PROBE_WIDTH)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    matrix, gradient = (torch.full(shape, value, device=device) for value in (0.5, 0.25))
    config = config.model_copy(update={"learning_rate": PROBE_RATE})  # it may not be derived yet
    optimizer = NamedOptimizer({"matrix": matrix}, {"matrix": gradient}, config=config)
    try:
        for _ in range(2):
            optimizer.step(learning_rate=PROBE_RATE)
    except Exception as error:  # whatever the code of a plugin raises
        log.warning("optimizer.not_measured", optimizer=config.optimizer, error=repr(error))
        return ADAMW_BYTES
    return sum(one.nbytes for one in optimizer.memory() if one.ndim) / matrix.numel()


def _shared_settings(kind: Any, config: TrainerConfig) -> dict[str, Any]:
    """Return those of `betas` and `eps` that a class takes in this form, as its defaults show."""
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


def _kind_of(value: object) -> str:
    if isinstance(value, Tensor):
        return TENSOR
    if isinstance(value, bool):
        return TRUTH
    return WHOLE if isinstance(value, int) else NUMBER
