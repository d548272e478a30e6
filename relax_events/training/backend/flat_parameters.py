"""Stores all parameters of a model in one flat tensor and all gradients in another: one reduction,
one norm and one optimizer call per step. AdamW runs over the flat tensors; an optimizer that the
run file names sees each parameter in its shape.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor, nn

from relax_events.config import TrainerConfig
from relax_events.config.training import ADAMW
from relax_events.models.adapters import published_parameters
from relax_events.training.backend.flat_adamw import FlatAdamW
from relax_events.training.backend.host_optimizer import copy_to_host, on_device
from relax_events.training.backend.named_optimizer import NamedOptimizer
from relax_events.training.backend.state import StateShard, StateSource, require_same_tensors
from relax_events.training.ranks import Ranks


def add_gradients_to(gradient: Tensor, parameter: nn.Parameter) -> None:
    """Add each gradient of a parameter to a tensor as it appears, and free it."""

    def add(parameter: Tensor) -> None:
        if parameter.grad is not None:
            gradient.add_(parameter.grad)
            parameter.grad = None

    parameter.register_post_accumulate_grad_hook(add)


class Optimizer(Protocol):
    """Updates flat values by flat gradients, both given at its start."""

    def step(self, *, learning_rate: float) -> None:
        """Update the values."""
        ...

    def memory(self) -> list[Tensor]:
        """Return the tensors of its state that take memory of the device."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """Return its state by name."""
        ...

    def expected(self, saved: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Return the names and shapes that its tensors must have in a state.

        Args:
            saved: Names and shapes of the state.
        """
        ...

    def load(self, state: StateSource) -> None:
        """Take over what `tensors` returned.

        Raises:
            WeightsError: The state is another optimizer's; nothing was changed.
        """
        ...


class FlatParameters:
    """Master weights in at least float32, and the optimizer over them.

    A float32 model's parameters and gradients are views into the flat tensors; a bfloat16 model
    keeps its own, its gradients are added in float32 as they appear, and it gets a rounded copy of
    the master weights after each update. So does a model whose optimizer is on the host.
    """

    def __init__(self, module: nn.Module, *, config: TrainerConfig) -> None:
        """Move the parameters of a module into flat tensors. Weight decay applies to matrices, not
        to vectors (norms, biases). Parameters without gradients are left in place. Of a module with
        adapters, only they belong to the state.

        Args:
            module: All its trainable parameters are of one dtype.
            config: The optimizer and its settings.
        Raises:
            ConfigError: The optimizer can't be made.
        """
        published = published_parameters(module)
        trainable = [
            (name, parameter) for name, parameter in published.items() if parameter.requires_grad
        ]
        self._frozen = {
            name: parameter for name, parameter in published.items() if not parameter.requires_grad
        }
        parameters = sorted(trainable, key=lambda item: item[1].ndim < 2)
        self._parameters = dict(parameters)
        first = parameters[0][1]
        dtype = torch.promote_types(first.dtype, torch.float32)
        self._device = first.device
        self.values = torch.cat([parameter.detach().flatten() for _, parameter in parameters]).to(
            dtype
        )
        self.gradients = torch.zeros_like(self.values)
        self._read_gradients = self.gradients
        if config.offload_optimizer:
            self.values = copy_to_host(self.values)
            self._read_gradients = copy_to_host(self.gradients)
        self._is_master = config.offload_optimizer or dtype != first.dtype
        for (_, parameter), value, gradient in zip(
            parameters,
            self._views(self.values).values(),
            self._views(self.gradients).values(),
            strict=True,
        ):
            if gradient.dtype != parameter.dtype:
                add_gradients_to(gradient, parameter)
            else:
                parameter.grad = gradient
            if not self._is_master:
                parameter.data = value
        self._optimizer = self._make_optimizer(config)

    def _make_optimizer(self, config: TrainerConfig) -> Optimizer:
        if config.optimizer != ADAMW:
            return NamedOptimizer(
                self._views(self.values), self._views(self._read_gradients), config=config
            )
        num_decayed = sum(one.numel() for one in self._parameters.values() if one.ndim >= 2)
        return FlatAdamW(
            self.values,
            self._read_gradients,
            views=self._views,
            num_decayed=num_decayed,
            config=config,
        )

    def _views(self, flat: Float[Tensor, " elements"]) -> dict[str, Tensor]:
        pieces = flat.split([parameter.numel() for parameter in self._parameters.values()])
        return {
            name: piece.view(parameter.shape)
            for (name, parameter), piece in zip(self._parameters.items(), pieces, strict=True)
        }

    def zero_gradients(self) -> None:
        """Set the gradients to zero."""
        self.gradients.zero_()

    def gradient_sum(self) -> Tensor:
        """Return the sum of all gradients."""
        return self.gradients.sum()

    def reduce_gradients(self, ranks: Ranks) -> None:
        """Sum the gradients over ranks. Collective."""
        ranks.all_reduce(self.gradients)

    def normalise_gradients(self, normaliser: float) -> float:
        """Divide the gradients, and return their norm in float64's range."""
        self.gradients /= normaliser
        return float(torch.linalg.vector_norm(self.gradients))

    def update(self, *, learning_rate: float, gradient_scale: float) -> None:
        """Scale the gradients, take one optimizer step, copy the weights to the model, and zero the
        gradients.
        """
        if gradient_scale != 1.0:
            self.gradients *= gradient_scale
        if self._read_gradients is not self.gradients:
            self._read_gradients.copy_(self.gradients)
        self._optimizer.step(learning_rate=learning_rate)
        self._copy_to_model()
        self.zero_gradients()

    @torch.no_grad()
    def _copy_to_model(self) -> None:
        if self._is_master:
            torch._foreach_copy_(
                list(self._parameters.values()), list(self._views(self.values).values())
            )

    def memory(self, *, with_gradients: bool) -> tuple[list[Tensor], list[Tensor]]:
        """Return tensors with all memory of the trained parameters, gradients and moments: what
        must be kept while it is off the device, and what `rebuild` computes again.

        Args:
            with_gradients: Whether the gradients must be kept.
        """
        kept = on_device([self.values, *self._optimizer.memory()], self._device)
        rebuilt: list[Tensor] = list(self._parameters.values()) if self._is_master else []
        (kept if with_gradients else rebuilt).append(self.gradients)
        return kept, rebuilt

    def rebuild(self, *, with_gradients: bool) -> None:
        """Compute what was not kept: a rounded copy of the master weights, and gradients of
        zero.
        """
        self._copy_to_model()
        if not with_gradients:
            self.zero_gradients()

    def tensors(self) -> dict[str, Tensor]:
        """Return master and frozen weights, `model.<name>`, and the optimizer's state."""
        return self._weights() | self._optimizer.tensors()

    def _weights(self) -> dict[str, Tensor]:
        masters = {f"model.{name}": view for name, view in self._views(self.values).items()}
        frozen = {f"model.{name}": parameter.detach() for name, parameter in self._frozen.items()}
        return masters | frozen

    def shards(self) -> list[StateShard]:
        """Return nothing: each rank holds whole tensors."""
        return []

    def load(self, state: StateSource, *, without: Collection[str] = ()) -> None:
        """Load what `tensors` returned, and zero the gradients.

        Args:
            state: As saved.
            without: Names in it that belong to others.
        Raises:
            WeightsError: A tensor is missing, unknown or of another shape; nothing was changed.
        """
        weights = self._weights()
        saved = {name: shape for name, shape in state.shapes.items() if name not in without}
        shapes = {name: tuple(one.shape) for name, one in weights.items()}
        require_same_tensors(saved, shapes | self._optimizer.expected(saved))
        self._optimizer.load(state)
        for name, tensor in weights.items():
            tensor.copy_(state.read(name))
        self._copy_to_model()
        self.zero_gradients()
