"""An optimizer that the run file names (`trainer.optimizer`): any class with the interface of
torch.optim, over whole parameters in master precision.

    class(parameter groups, lr, ...)      matrices with weight decay, vectors without
    its state                             saved by parameter; its numbers as tensors
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from relax_events.config import TrainerConfig
from relax_events.errors import WeightsError
from relax_events.models.optimizers import make_optimizer
from relax_events.training.backend.state import StateSource

PREFIX = "optimizer."
TENSOR, NUMBER, TRUTH, WHOLE = "tensor", "number", "truth", "whole"
"""Kinds of a value in an optimizer's state."""
DTYPES = {NUMBER: torch.float64, TRUTH: torch.bool, WHOLE: torch.int64}


class NamedOptimizer:
    """See the module's docstring. An `Optimizer` of a `FlatPart`, without moments of its own."""

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
        self.moments: Mapping[str, Tensor] = {}
        self._parameters = {name: nn.Parameter(value) for name, value in values.items()}
        for name, parameter in self._parameters.items():
            parameter.grad = gradients[name]
        self._names: dict[Tensor, str] = {
            parameter: name for name, parameter in self._parameters.items()
        }
        self._optimizer = make_optimizer(config, list(self._parameters.values()))

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
                kind = _find_kind(value)
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
        states: dict[Tensor, dict[str, Any]] = {}
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
            states.setdefault(parameter, {})[key] = kept
        self._optimizer.state.clear()
        self._optimizer.state.update(states)


def _find_kind(value: object) -> str:
    if isinstance(value, Tensor):
        return TENSOR
    if isinstance(value, bool):
        return TRUTH
    return WHOLE if isinstance(value, int) else NUMBER
