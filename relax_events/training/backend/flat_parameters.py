"""Stores all parameters of a model that each rank holds whole in one flat tensor, and all gradients
in another. AdamW runs over the flat tensors; an optimizer that the run file names sees each
parameter in its shape.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from relax_events.config import TrainerConfig
from relax_events.models.adapters import published_parameters
from relax_events.training.backend.flat_part import FlatPart
from relax_events.training.backend.parameter_store import ParameterStore
from relax_events.training.backend.state import StateSource
from relax_events.training.ranks import Ranks


class FlatParameters(ParameterStore):
    """One flat part with all trained parameters, and the frozen ones as they are."""

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
