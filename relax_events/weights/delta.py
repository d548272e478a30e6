"""Computes and applies deltas between two versions of a tensor: positions and new values, bit for
bit. Imports no torch.

In bfloat16 a step of fine-tuning leaves most values unchanged; in float32 nearly all change, and a
delta saves nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from relax_events.errors import WeightsError

if TYPE_CHECKING:
    from torch import Tensor

POSITIONS, VALUES = "@positions", "@values"
"""Suffixes of a tensor's name in a file that holds its delta."""
MAX_INT32 = 2**31 - 1


def compute_delta(old: Tensor, new: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the positions in row-major order (int32 or int64, ascending) and the values at which a
    tensor differs; None if the whole tensor is smaller.

    Args:
        old: On the CPU.
        new: Of the same dtype and shape, on the CPU.
    """
    import torch

    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[new.element_size()]
    flat = new.contiguous().reshape(-1)
    positions = torch.nonzero(flat.view(bits) != old.contiguous().reshape(-1).view(bits)).flatten()
    positions = positions.to(torch.int32 if flat.numel() <= MAX_INT32 else torch.int64)
    if len(positions) * (positions.element_size() + flat.element_size()) >= flat.nbytes:
        return None
    return positions, flat.view(bits)[positions].view(flat.dtype)


def apply_delta(
    name: str,
    old: bytearray | memoryview,
    positions: np.ndarray,
    values: bytearray | memoryview,
) -> bytearray | memoryview:
    """Return a copy of a tensor's bytes with new values at some positions.

    Raises:
        WeightsError: A position is outside the tensor, or the numbers of positions and values
            differ.
    """
    size = len(values) // len(positions) if len(positions) else 1
    if len(values) != size * len(positions) or size not in (1, 2, 4, 8) or len(old) % size:
        raise WeightsError(
            f"{name} has {len(positions)} changed positions and {len(values)} bytes of "
            f"values for {len(old)} bytes"
        )
    if len(positions) and not 0 <= positions.min() <= positions.max() < len(old) // size:
        raise WeightsError(
            f"{name} has changes at positions {positions.min()} to {positions.max()} of "
            f"{len(old) // size}"
        )
    if not len(positions):
        return old
    new = bytearray(old)
    np.frombuffer(new, dtype=f"u{size}")[positions] = np.frombuffer(values, dtype=f"u{size}")
    return new
