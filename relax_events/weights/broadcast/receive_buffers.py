"""Memory to receive weights into, which another process of this machine can be let into."""

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
    """Bytes to receive into, filled with zeros at first.

    Attributes:
        data: They.
        name: What another process needs to open them.
    """

    def __init__(self, num_bytes: int) -> None:
        """Take memory; its size is sealed, so that nobody's view of it can lose its ground."""
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
    """Look at a file in memory, all of whose pages are made ready at once."""
    memory = mmap.mmap(file, max(1, num_bytes), flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    return torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes]
