"""Reconciles replayed float32 master weights with the published weights after a replay that is not
bit-exact.

The published weights of a bfloat16 model are the master weights rounded to 8 bits, which is coarser
than many updates. They determine the interval of each master weight; the replayed weight determines
its value in the interval. A replayed weight outside its interval is moved to the interval's end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from relax_events.training.backend.state import TrainerState, cut

BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
"""Integer type of a dtype's size: the next integer is the next representable number."""


@dataclass(frozen=True, slots=True)
class Reconciliation:
    """How far replayed master weights differed from the published ones.

    Attributes:
        num_weights: Number of weights.
        num_moved: Weights that did not round to their published value.
        largest_move: Largest correction, in the weights' unit.
    """

    num_weights: int
    num_moved: int
    largest_move: float


def reconcile(
    state: TrainerState, published: Mapping[str, Tensor]
) -> tuple[TrainerState, Reconciliation]:
    """Return a replayed state whose master weights are the nearest ones that round to the published
    weights; the rest is unchanged.

    Args:
        state: As replayed; of a state in pieces, this rank's are moved and counted.
        published: By name, without the prefix `model.`.
    """
    num_values, num_moved, largest = 0, 0, 0.0

    def move(name: str, master: Tensor, offset: tuple[int, ...] | None) -> Tensor:
        nonlocal num_values, num_moved, largest
        whole = published.get(name.removeprefix("model.")) if name.startswith("model.") else None
        if whole is None:
            return master
        piece = cut(whole, offset=offset, shape=tuple(master.shape))
        nearest = nearest_value_rounding_to(piece.to(master.device), master)
        moved = nearest != master
        num_values, num_moved = num_values + master.numel(), num_moved + int(moved.sum())
        if moved.any():
            largest = max(largest, float((nearest - master)[moved].abs().max()))
        return nearest

    shards, copies = (
        [replace(shard, tensor=move(shard.name, shard.tensor, shard.offset)) for shard in pieces]
        for pieces in (state.shards, state.copies)
    )
    moved_state = replace(
        state,
        tensors={name: move(name, tensor, None) for name, tensor in state.tensors.items()},
        shards=shards,
        copies=copies,
    )
    return moved_state, Reconciliation(num_values, num_moved, largest)


def nearest_value_rounding_to(
    rounded: Float[Tensor, "*shape"], values: Float[Tensor, "*shape"]
) -> Float[Tensor, "*shape"]:
    """Return, for each value, the nearest value of its dtype that rounds to the given one.

    Args:
        rounded: Finite, in the dtype that the result rounds to.
        values: In the same dtype or a wider one; where a value is not finite, the result is the
            rounded one.
    """
    exact = rounded.to(values.dtype)
    if rounded.dtype not in BITS or rounded.dtype == values.dtype:
        return exact
    inside = torch.where(
        values.to(rounded.dtype) == rounded, values, _interval_ends(rounded, exact, values)
    )
    # The end of an interval lies as near to the neighbour, and rounds to the even one of the two:
    # then it is a step too far.
    inwards = torch.where(
        inside.to(rounded.dtype) == rounded, inside, torch.nextafter(inside, exact)
    )
    return torch.where(torch.isfinite(values), inwards, exact)


def _interval_ends(rounded: Tensor, exact: Tensor, values: Tensor) -> Tensor:
    """Return the end of the rounding interval on the side of each value: half way to the next
    representable number there.
    """
    bits = rounded.view(BITS[rounded.dtype])
    away = (values > exact) == (exact > 0)
    neighbour = torch.where(away, bits + 1, bits - 1).to(bits.dtype).view(rounded.dtype)
    tiny = torch.zeros_like(bits).add_(1).view(rounded.dtype)
    neighbour = torch.where(rounded == 0, torch.where(values > 0, tiny, -tiny), neighbour)
    return (exact + neighbour.to(values.dtype)) / 2
