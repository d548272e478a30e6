"""Memory buffers to receive weights into, which another process of the same host can map."""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from typing import Any

import torch
from jaxtyping import UInt8
from torch import Tensor

NAME = "relax-weights"


class ReceiveBuffer:
    """A zero-filled buffer to receive into.

    Attributes:
        data: Its bytes.
        handle: What another process needs to map it.
    """

    def __init__(self, num_bytes: int) -> None:
        """Allocate memory; its size is sealed, so that no mapping of it can become invalid."""
        file = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, file)
        os.ftruncate(file, max(1, num_bytes))
        fcntl.fcntl(
            file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        )
        self.data: UInt8[Tensor, " bytes"] = map_buffer(file, num_bytes)
        self.handle: dict[str, Any] = {
            "process": os.getpid(),
            "file": file,
            "number": os.fstat(file).st_ino,
        }


def map_buffer(file: int, num_bytes: int) -> UInt8[Tensor, " bytes"]:
    """Map a memory file and populate all of its pages at once."""
    memory = mmap.mmap(file, max(1, num_bytes), flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    return torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes]
