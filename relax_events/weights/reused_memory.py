"""Lends memory to the files of one version after the other.

The system clears fresh memory when it is first written, which takes ten times as long as copying
weights into memory that was used before.
"""

from __future__ import annotations

import weakref
from collections import deque

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor


class ReusedMemory:
    """Memory that comes back by itself once nothing uses it any more, in whichever thread that
    happens. `take` and `drop_unused` are called from one thread.
    """

    def __init__(self) -> None:
        self._returned: deque[UInt8[np.ndarray, " bytes"]] = deque()
        self._free: list[UInt8[np.ndarray, " bytes"]] = []

    @property
    def num_free_bytes(self) -> int:
        """Bytes that are held for the next version."""
        self._collect()
        return sum(len(memory) for memory in self._free)

    def take(self, num_bytes: int) -> UInt8[Tensor, " bytes"]:
        """Lend memory of at least so many bytes: the smallest free one, else a fresh one. It is
        free again when the last tensor or buffer that shares it is gone.
        """
        self._collect()
        fitting = [index for index, free in enumerate(self._free) if len(free) >= num_bytes]
        if fitting:
            memory = self._free.pop(min(fitting, key=lambda index: len(self._free[index])))
        else:
            memory = np.empty(num_bytes, dtype=np.uint8)
        lent = memory[:]  # tensors refer to this view; `memory` itself outlives them
        weakref.finalize(lent, self._returned.append, memory).atexit = False
        return torch.from_numpy(lent)

    def drop_unused(self) -> None:
        """Return memory that a whole version did not use to the system."""
        self._collect()
        self._free.clear()

    def _collect(self) -> None:
        while self._returned:
            self._free.append(self._returned.popleft())
