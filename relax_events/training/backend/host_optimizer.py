"""The memory of an optimizer on the host (`trainer.offload_optimizer`): master weights, moments and
a copy of the gradients, which the processors update.

    device                          host
    gradients         ──────▶       copy of the gradients
                                    AdamW: moments, master weights
    weights           ◀──────       master weights, rounded
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def copy_to_host(tensor: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """Return a copy in memory of its own on the host, pinned where the tensor is on a GPU."""
    copy = torch.empty(
        tensor.shape, dtype=dtype or tensor.dtype, device="cpu", pin_memory=tensor.is_cuda
    )
    return copy.copy_(tensor.detach())


def on_device(tensors: Iterable[Tensor], device: torch.device) -> list[Tensor]:
    """Return the tensors that are on a device."""
    return [tensor for tensor in tensors if tensor.device == device]
