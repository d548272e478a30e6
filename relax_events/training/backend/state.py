"""The state of a trainer, held in pieces by its ranks: what a rank has of it, and where it reads
the pieces that it needs.

A piece is a rectangle of a tensor in Hugging Face names. So a state that was saved from one layout
of ranks is loaded by any other one, and by another backend.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from relax_events.errors import WeightsError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StateShard:
    """A rectangular piece of a tensor.

    Attributes:
        name: Of the whole tensor: `model.<name>`, `exp_avg.<name>`, `exp_avg_sq.<name>`.
        global_shape: Of the whole tensor.
        offset: Of the piece's first element in the whole tensor, for each dimension.
        tensor: The piece's values; live until the next step.
    """

    name: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    tensor: Tensor


class StateSource(Protocol):
    """A state to load: any rank reads any piece of any tensor. Reading is not collective."""

    @property
    def policy_version(self) -> int:
        """Version of the weights."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of each whole tensor, by name."""

    def read(
        self,
        name: str,
        *,
        offset: tuple[int, ...] | None = None,
        shape: tuple[int, ...] | None = None,
    ) -> Tensor:
        """Return a piece, or without offset and shape the whole tensor; the caller does not change
        it.
        """


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """What a rank holds of the state: all that the backend needs to resume. As a `StateSource`, it
    has the pieces of this rank alone.

    Attributes:
        policy_version: Version of the weights.
        tensors: Whole tensors, the same on all ranks: `model.<name>`, `exp_avg.<name>`,
            `optimizer.<...>`, `rng.<...>`.
        shards: This rank's pieces of the other tensors. The pieces of all ranks cover each tensor
            without overlap.
        copies: Pieces that this rank holds too, and that are among another rank's shards.
        other_shapes: Shapes of tensors of which this rank holds nothing.
    """

    policy_version: int
    tensors: Mapping[str, Tensor]
    shards: Sequence[StateShard] = ()
    copies: Sequence[StateShard] = ()
    other_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each whole tensor."""
        whole = {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}
        held = {shard.name: shard.global_shape for shard in (*self.shards, *self.copies)}
        return {**self.other_shapes, **whole, **held}

    @cached_property
    def _shards_by_name(self) -> dict[str, list[StateShard]]:
        by_name: dict[str, list[StateShard]] = {}
        for shard in (*self.shards, *self.copies):
            by_name.setdefault(shard.name, []).append(shard)
        return by_name

    def read(
        self,
        name: str,
        *,
        offset: tuple[int, ...] | None = None,
        shape: tuple[int, ...] | None = None,
    ) -> Tensor:
        """Return a piece; see `StateSource`.

        Raises:
            WeightsError: Another rank holds it.
        """
        if name in self.tensors:
            return cut(self.tensors[name], offset=offset, shape=shape)
        start = offset or (0,) * len(self.shapes[name])
        size = shape or self.shapes[name]
        for shard in self._shards_by_name.get(name, ()):
            inner = tuple(at - first for at, first in zip(start, shard.offset, strict=True))
            ends = zip(inner, size, shard.tensor.shape, strict=True)
            if all(at >= 0 and at + n <= end for at, n, end in ends):
                return cut(shard.tensor, offset=inner, shape=size)
        raise WeightsError(
            f"the piece of {name} at {start} of shape {size} is not held by this rank; read it "
            "from a checkpoint"
        )


@dataclass(frozen=True)
class OverlaidState:
    """A state in which some tensors are another source's."""

    policy_version: int
    base: StateSource
    over: StateSource

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each whole tensor."""
        return {**self.base.shapes, **self.over.shapes}

    def read(
        self,
        name: str,
        *,
        offset: tuple[int, ...] | None = None,
        shape: tuple[int, ...] | None = None,
    ) -> Tensor:
        """Return a piece; see `StateSource`."""
        source = self.over if name in self.over.shapes else self.base
        return source.read(name, offset=offset, shape=shape)


def cut(tensor: Tensor, *, offset: tuple[int, ...] | None, shape: tuple[int, ...] | None) -> Tensor:
    """Return a rectangle of a tensor as a view; without offset and shape, the tensor."""
    if offset is None or shape is None:
        return tensor
    return tensor[tuple(slice(at, at + length) for at, length in zip(offset, shape, strict=True))]


def require_same_tensors(
    shapes: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]
) -> None:
    """Require that a state has the tensors of a model.

    Args:
        shapes: Of the state.
        expected: Of the model.
    Raises:
        WeightsError: A tensor is missing, unknown or of another shape; the text names it.
    """
    if different := sorted(expected.keys() ^ shapes.keys()):
        where = "the model" if different[0] in expected else "the state"
        raise WeightsError(
            f"{different[0]} is only in {where} ({len(different)} such in all); is the "
            "state another model's?"
        )
    for name, shape in shapes.items():
        if shape != expected[name]:
            raise WeightsError(
                f"{name} is {shape} in the state and {expected[name]} in the model; is the state "
                "another model's?"
            )
