"""Adds adapters to the weights of their base model, one matrix at a time."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor

from relax_events.errors import WeightsError
from relax_events.models.adapters import ADAPTER


def merge_matrix(
    base: Float[Tensor, "outputs inputs"],
    down: Float[Tensor, "rank inputs"],
    up: Float[Tensor, "outputs rank"],
    *,
    scaling: float,
) -> Float[Tensor, "outputs inputs"]:
    """Return `base + scaling * up @ down` in the base's dtype, computed in float32 and rounded
    once.

    Args:
        base: Weights of a linear layer.
        down: Matrix A of its adapter.
        up: Matrix B of its adapter.
        scaling: `LoRAConfig.scaling`.
    """
    return torch.addmm(base.float(), up.float(), down.float(), alpha=scaling).to(base.dtype)


def list_adapted_modules(names: Iterable[str]) -> list[str]:
    """Return the modules with adapters, sorted.

    Args:
        names: Of the parameters A and B.
    Raises:
        WeightsError: A name is no adapter's, or a module has only one of its two; the text names
            it.
    """
    pairs: dict[str, set[str]] = {}
    for name in names:
        if (match := ADAPTER.fullmatch(name)) is None:
            raise WeightsError(
                f"{name} is no parameter of an adapter; publish adapters, as model.lora says"
            )
        pairs.setdefault(match["module"], set()).add(match["matrix"])
    if half := sorted(module for module, matrices in pairs.items() if len(matrices) < 2):
        raise WeightsError(f"{half[0]} has only one of the two matrices of its adapter")
    return sorted(pairs)


def adapter_names(module: str) -> tuple[str, str]:
    """Return the names of a module's parameters A and B."""
    return f"{module}.lora_A.default.weight", f"{module}.lora_B.default.weight"
