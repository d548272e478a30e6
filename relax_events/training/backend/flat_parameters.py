"""Flat tensors of parameters that the same ranks hold, and of their gradients: one reduction, one
norm and one optimizer call. Each of the ranks keeps master weights and the optimizer's state of an
equal slice (the distributed optimizer); a rank alone keeps all.

    gradients ── sum over ranks, to the owner of each slice ──▶ optimizer ──▶ weights of all slices

AdamW runs over the flat tensors; an optimizer that the run file names sees each parameter in its
shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch import distributed as dist

from relax_events.config import TrainerConfig
from relax_events.config.training import ADAMW
from relax_events.models.adapters import published_parameters
from relax_events.training.backend.flat_adamw import FlatAdamW
from relax_events.training.backend.named_optimizer import NamedOptimizer
from relax_events.training.backend.parameter_store import ParameterStore, copy_to_host, on_device
from relax_events.training.backend.state import StateSource
from relax_events.training.ranks import Ranks


class Optimizer(Protocol):
    """Updates flat values by flat gradients, both given at its start."""

    moments: Mapping[str, Tensor]
    """What it keeps for each value, by kind, as flat as the values."""

    def step(self, *, learning_rate: float) -> None:
        """Update the values."""
        ...

    def memory(self) -> list[Tensor]:
        """Return the tensors of its state that take memory of the device."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """Return its state without the moments, by name."""
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


class FlatPart:
    """See the module's docstring. Without a group nothing is collective; with one, all methods but
    `squares` may be.

    Master weights have at least float32. The parameters of a float32 model are views into them, or
    into the weights of all slices; a rank alone with a bfloat16 model, or with its optimizer on the
    host, rounds the master weights into the model's own parameters. Gradients of another dtype are
    added as they appear.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        config: TrainerConfig,
        group: Any = None,
    ) -> None:
        """Move parameters into flat tensors.

        Args:
            parameters: By name; all matrices, to which alone weight decay applies, stand before
                all vectors.
            config: The optimizer and its settings.
            group: The ranks that hold the same parameters; by default this one alone.
        Raises:
            ConfigError: The optimizer can't be made.
        """
        self._group, self._parameters = group, dict(parameters)
        num_ranks, rank = (1, 0) if group is None else (group.size(), group.rank())
        members = list(parameters.values())
        sizes = [parameter.numel() for parameter in members]
        self.starts = [sum(sizes[:index]) for index in range(len(sizes))]
        slice_size = -(-sum(sizes) // num_ranks)
        self.start, self.end = rank * slice_size, (rank + 1) * slice_size
        first = members[0]
        self._device = first.device
        master = torch.promote_types(first.dtype, torch.float32)
        self._has_masters = config.offload_optimizer or master != first.dtype
        self._rounds_alone = self._has_masters and num_ranks == 1
        padding = first.new_zeros(slice_size * num_ranks - sum(sizes))
        weights = torch.cat([*(one.detach().flatten() for one in members), padding])
        self._weights = None if self._rounds_alone else weights
        self.gradients = torch.zeros_like(weights, dtype=master)
        self._tie_parameters()
        own_weights = weights[self.start : self.end]
        self._own_gradients = self.gradients[self.start : self.end]
        self.masters, self._read_gradients = own_weights.to(master), self._own_gradients
        if config.offload_optimizer:
            self.masters = copy_to_host(own_weights, dtype=master)
            self._read_gradients = copy_to_host(self._own_gradients)
        self.optimizer = self._make_optimizer(config)

    def _make_optimizer(self, config: TrainerConfig) -> Optimizer:
        if config.optimizer != ADAMW:
            values, gradients = self.split(self.masters), self.split(self._read_gradients)
            return NamedOptimizer(values, gradients, config=config)
        num_decayed = sum(one.numel() for one in self._parameters.values() if one.ndim >= 2)
        return FlatAdamW(
            self.masters,
            self._read_gradients,
            num_decayed=min(max(num_decayed - self.start, 0), len(self.masters)),
            config=config,
        )

    def _tie_parameters(self) -> None:
        """Let parameters and their gradients be views into the flat tensors."""
        for name, gradient in self.split(self.gradients).items():
            parameter = self._parameters[name]
            if gradient.dtype != parameter.dtype:
                _add_gradients_to(gradient, parameter)
            else:
                parameter.grad = gradient
        if self._weights is not None:
            for name, weights in self.split(self._weights).items():
                self._parameters[name].data = weights

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        """Return the parameters' views into a flat tensor of all slices, by name."""
        return {
            name: flat[start : start + one.numel()].view(one.shape)
            for start, (name, one) in zip(self.starts, self._parameters.items(), strict=True)
        }

    def zero_gradients(self) -> None:
        """Set the gradients to zero."""
        self.gradients.zero_()

    def select_gradients(self, begin: int, end: int) -> Tensor:
        """Return the gradients of consecutive parameters, as a view."""
        bounds = [*self.starts, len(self.gradients)]
        return self.gradients[bounds[begin] : bounds[end]]

    def reduce_gradients(self) -> None:
        """Sum the gradients over the group; each rank gets the sums of its slice."""
        if self._group is not None and self._group.size() > 1:
            total = torch.empty_like(self._own_gradients)
            dist.reduce_scatter_tensor(total, self.gradients, group=self._group)
            self._own_gradients.copy_(total)

    def normalise_gradients(self, normaliser: float) -> None:
        """Divide the gradients of the own slice."""
        self._own_gradients /= normaliser

    def squares(self, begin: int, end: int) -> float:
        """Return the sum of the squared gradients of consecutive parameters in the own slice."""
        bounds = [*self.starts, len(self.gradients)]
        low, high = (
            min(max(bounds[at] - self.start, 0), len(self._own_gradients)) for at in (begin, end)
        )
        return float(torch.linalg.vector_norm(self._own_gradients[low:high])) ** 2

    def update(self, *, learning_rate: float, gradient_scale: float) -> None:
        """Scale the gradients, take one optimizer step, and zero the gradients."""
        if gradient_scale != 1.0:
            self._own_gradients *= gradient_scale
        if self._read_gradients is not self._own_gradients:
            self._read_gradients.copy_(self._own_gradients)
        self.optimizer.step(learning_rate=learning_rate)
        self.share_masters()
        self.zero_gradients()

    @torch.no_grad()
    def share_masters(self) -> None:
        """Round the master weights of each slice into the weights of all ranks."""
        if self._rounds_alone:
            torch._foreach_copy_(
                list(self._parameters.values()), list(self.split(self.masters).values())
            )
        elif self._weights is not None and self._group is not None and self._group.size() > 1:
            mine = self.masters.to(self._weights.dtype).to(self._weights.device)
            # a float32 model's masters are a part of its weights
            mine = mine if self._has_masters else mine.clone()
            dist.all_gather_into_tensor(self._weights, mine, group=self._group)

    def memory(self, *, with_gradients: bool) -> tuple[list[Tensor], list[Tensor]]:
        """Return tensors with all memory of the part; see `ParameterStore.memory`."""
        kept = on_device([self.masters, *self.optimizer.memory()], self._device)
        rebuilt: list[Tensor] = []
        (kept if with_gradients else rebuilt).append(self.gradients)
        if self._weights is None:
            rebuilt += self._parameters.values()
        else:
            kept.append(self._weights)
        return kept, rebuilt

    def rebuild(self, *, with_gradients: bool) -> None:
        """Compute what was not kept; local to the rank."""
        if self._rounds_alone:
            self.share_masters()
        if not with_gradients:
            self.zero_gradients()


def _add_gradients_to(gradient: Tensor, parameter: nn.Parameter) -> None:
    """Add each gradient of a parameter to a tensor as it appears, and free it."""

    def add(parameter: Tensor) -> None:
        if parameter.grad is not None:
            gradient.add_(parameter.grad)
            parameter.grad = None

    parameter.register_post_accumulate_grad_hook(add)


class FlatParameters(ParameterStore):
    """The parameters of a model that each rank holds whole: one flat part with all trained ones,
    and the frozen ones as they are.
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
        trained = [(name, one) for name, one in published.items() if one.requires_grad]
        self._frozen = {name: one for name, one in published.items() if not one.requires_grad}
        self._part = FlatPart(
            dict(sorted(trained, key=lambda item: item[1].ndim < 2)), config=config
        )
        self.values, self.gradients = self._part.masters, self._part.gradients

    def zero_gradients(self) -> None:
        """Set the gradients to zero."""
        self._part.zero_gradients()

    def gradient_sum(self) -> Tensor:
        """Return the sum of all gradients."""
        return self.gradients.sum()

    def reduce_gradients(self, ranks: Ranks) -> None:
        """Sum the gradients over ranks. Collective."""
        ranks.all_reduce(self.gradients)

    def normalise_gradients(self, normaliser: float) -> float:
        """Divide the gradients, and return their norm in float64's range."""
        self._part.normalise_gradients(normaliser)
        return float(torch.linalg.vector_norm(self.gradients))

    def update(self, *, learning_rate: float, gradient_scale: float) -> None:
        """Scale the gradients, take one optimizer step, copy the weights to the model, and zero the
        gradients.
        """
        self._part.update(learning_rate=learning_rate, gradient_scale=gradient_scale)

    def memory(self, *, with_gradients: bool = False) -> tuple[list[Tensor], list[Tensor]]:
        """Return tensors with all memory of the trained parameters; see `ParameterStore`."""
        return self._part.memory(with_gradients=with_gradients)

    def rebuild(self, *, with_gradients: bool = False) -> None:
        """Compute what was not kept: a rounded copy of the master weights, and gradients of
        zero.
        """
        self._part.rebuild(with_gradients=with_gradients)

    def tensors(self) -> dict[str, Tensor]:
        """Return master and frozen weights, `model.<name>`, and the optimizer's state: moments as
        `exp_avg.<name>`, `exp_avg_sq.<name>`.
        """
        optimizer = self._part.optimizer
        trained = {
            f"{kind}.{name}": view
            for kind, flat in {"model": self.values, **optimizer.moments}.items()
            for name, view in self._part.split(flat).items()
        }
        frozen = {f"model.{name}": parameter.detach() for name, parameter in self._frozen.items()}
        return trained | frozen | optimizer.tensors()

    def _expected(self, saved: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        of_optimizer = self._part.optimizer.tensors().keys()
        held = {
            name: shape
            for name, shape in super()._expected(saved).items()
            if name not in of_optimizer
        }
        return held | self._part.optimizer.expected(saved)

    def _load_optimizer(self, state: StateSource) -> None:
        self._part.optimizer.load(state)

    def _share_loaded(self) -> None:
        self._part.share_masters()
