"""What every store of a model's trained parameters has, with their gradients and optimizer:
`FlatParameters` of one rank, `ShardedParameters` of a model sharded over all ranks, and
`RankParameters` of one that megatron-core divides.

The memory of an optimizer may be on the host (`trainer.offload_optimizer`): master weights, moments
and a copy of the gradients, which the processors update.

    device                          host
    gradients         ──────▶       copy of the gradients
                                    AdamW: moments, master weights
    weights           ◀──────       master weights, rounded
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor

from relax_events.training.backend.state import (
    StateShard,
    StateSource,
    TrainerState,
    require_same_tensors,
)
from relax_events.training.ranks import Ranks


class ParameterStore(ABC):
    """The parameters of one rank. `reduce_gradients`, `normalise_gradients`, `update` and `load`
    may be collective; their results are the same on all ranks.
    """

    @abstractmethod
    def zero_gradients(self) -> None:
        """Set the gradients to zero."""

    @abstractmethod
    def reduce_gradients(self, ranks: Ranks) -> None:
        """Sum the gradients over ranks."""

    @abstractmethod
    def normalise_gradients(self, normaliser: float) -> float:
        """Divide the gradients, and return their norm over all ranks."""

    @abstractmethod
    def update(self, *, learning_rate: float, gradient_scale: float) -> None:
        """Scale the gradients, take one optimizer step, and zero the gradients."""

    @abstractmethod
    def memory(self, *, with_gradients: bool = False) -> tuple[list[Tensor], list[Tensor]]:
        """Return tensors with all memory of the trained parameters, gradients and moments between
        two steps: what must be kept while it is off the device, and what `rebuild` computes again.

        Args:
            with_gradients: Whether the gradients must be kept.
        """

    @abstractmethod
    def rebuild(self, *, with_gradients: bool = False) -> None:
        """Compute what was not kept, on this rank alone."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the state that are whole on each rank."""

    def shards(self) -> list[StateShard]:
        """Return the pieces that this rank saves: `model.<name>`, `exp_avg.<name>`,
        `exp_avg_sq.<name>`.
        """
        return []

    def copies(self) -> list[StateShard]:
        """Return the pieces that this rank holds too and others save."""
        return []

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of tensors of which this rank may hold nothing."""
        return {}

    def state(
        self, policy_version: int, *, others: Mapping[str, Tensor] | None = None
    ) -> TrainerState:
        """Return what this rank holds of the state; its tensors are live.

        Args:
            policy_version: Version of the weights.
            others: Whole tensors that are not of the parameters.
        """
        return TrainerState(
            policy_version=policy_version,
            tensors=self.tensors() | dict(others or {}),
            shards=self.shards(),
            copies=self.copies(),
            other_shapes=self.shapes(),
        )

    @torch.no_grad()
    def load(self, state: StateSource, *, without: Collection[str] = ()) -> None:
        """Load what `state` returned, on any ranks, and zero the gradients.

        Args:
            state: As saved.
            without: Names in it that belong to others.
        Raises:
            WeightsError: A tensor is missing, unknown or of another shape; nothing was changed.
        """
        saved = {name: shape for name, shape in state.shapes.items() if name not in without}
        require_same_tensors(saved, self._expected(saved))
        self._load_optimizer(state)
        held = self.state(state.policy_version)
        for name, tensor in held.tensors.items():
            tensor.copy_(state.read(name))
        for piece in (*held.shards, *held.copies):
            if piece.tensor.numel():
                shape = tuple(piece.tensor.shape)
                piece.tensor.copy_(state.read(piece.name, offset=piece.offset, shape=shape))
        self._share_loaded()
        self.zero_gradients()

    def _expected(self, saved: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Return the names and shapes that a state must have."""
        del saved
        return self.state(0).shapes

    @abstractmethod
    def _load_optimizer(self, state: StateSource) -> None:
        """Load what of the optimizer's state is not in `state`'s tensors alone.

        Raises:
            WeightsError: The state is another optimizer's; nothing was changed.
        """

    @abstractmethod
    def _share_loaded(self) -> None:
        """Copy the loaded weights to where else they are held."""


def copy_to_host(tensor: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """Return a copy in memory of its own on the host, pinned where the tensor is on a GPU."""
    copy = torch.empty(
        tensor.shape, dtype=dtype or tensor.dtype, device="cpu", pin_memory=tensor.is_cuda
    )
    return copy.copy_(tensor.detach())


def on_device(tensors: Iterable[Tensor], device: torch.device) -> list[Tensor]:
    """Return the tensors that are on a device."""
    return [tensor for tensor in tensors if tensor.device == device]
