"""Moves the memory of tensors off a device and back, in place: tensors, their views and optimizers
over them stay valid, and only their memory is gone in between.

From a GPU the bytes go to pinned memory of the host, which is kept for the next time. From the CPU,
whose memory is the host's, they go to a file without a name in a folder of the run, and the kernel
gets the pages back. The file vanishes with the process, however that ends.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import torch
from jaxtyping import UInt8
from torch import Tensor
from torch.distributed.tensor import DTensor

from relax_events.errors import EnvironmentProblem

MAX_CALL_BYTES = 2**30
"""Linux reads and writes less than 2 GiB in one call."""


class Host(Protocol):
    """Where the bytes are while they are off a device."""

    def move_away(
        self, kept: Sequence[torch.UntypedStorage], dropped: Sequence[torch.UntypedStorage]
    ) -> int:
        """Take the bytes of `kept`, free the memory of all, and return its size in bytes."""
        ...

    def bring_back(self) -> None:
        """Allocate all memory again, and restore the bytes of `kept`."""
        ...


class Offload:
    """The memory of some tensors, off the device or on it.

    Used by one thread; while the memory is off the device, nothing may read or write the tensors.
    """

    def __init__(self, folder: Path) -> None:
        """Start with everything on the device.

        Args:
            folder: Where tensors of the CPU are written; it is created when it is needed.
        """
        self._folder = folder
        self._host: Host | None = None
        self.is_away = False
        """Whether the memory is off the device."""

    def move_away(self, kept: Iterable[Tensor], *, dropped: Iterable[Tensor] = ()) -> int:
        """Free the memory of tensors; return how many bytes that are. Does nothing while it is off
        the device.

        Args:
            kept: Restored by `bring_back`; all on one device.
            dropped: Only their memory is allocated again, with any content; tensors that share
                memory with one of `kept` are kept.
        Raises:
            EnvironmentProblem: The file can't be written; then everything is still there.
        """
        if self.is_away:
            return 0
        saved, freed = _storages(kept), _storages(dropped)
        if self._host is None:
            is_cpu = all(storage.device.type == "cpu" for storage in saved.values())
            self._host = FileHost(self._folder) if is_cpu else PinnedHost()
        num_bytes = self._host.move_away(
            list(saved.values()), [freed[key] for key in freed.keys() - saved.keys()]
        )
        self.is_away = True
        return num_bytes

    def bring_back(self) -> None:
        """Allocate the memory again, and restore what was kept. Does nothing while it is on the
        device.

        Raises:
            EnvironmentProblem: The file can't be read.
        """
        if self.is_away and self._host is not None:
            self._host.bring_back()
            self.is_away = False


class PinnedHost:
    """Keeps the bytes of a GPU's tensors in pinned memory."""

    def __init__(self) -> None:
        self._pinned: list[Tensor] = []
        self._kept: list[torch.UntypedStorage] = []
        self._sizes: list[tuple[torch.UntypedStorage, int]] = []

    def move_away(
        self, kept: Sequence[torch.UntypedStorage], dropped: Sequence[torch.UntypedStorage]
    ) -> int:
        """Copy, and free; see `Host`."""
        sizes = [storage.nbytes() for storage in kept]
        if [host.nbytes for host in self._pinned] != sizes:
            self._pinned = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in sizes]
        for storage, host in zip(kept, self._pinned, strict=True):
            host.copy_(_view_bytes(storage), non_blocking=True)
        torch.cuda.synchronize(kept[0].device)
        self._kept = list(kept)
        self._sizes = [(storage, storage.nbytes()) for storage in (*kept, *dropped)]
        for storage, _ in self._sizes:
            storage.resize_(0)
        torch.cuda.empty_cache()
        return sum(size for _, size in self._sizes)

    def bring_back(self) -> None:
        """Allocate, and copy back; see `Host`."""
        for storage, size in self._sizes:
            storage.resize_(size)
        for storage, host in zip(self._kept, self._pinned, strict=True):
            _view_bytes(storage).copy_(host, non_blocking=True)
        torch.cuda.synchronize(self._kept[0].device)


class FileHost:
    """Keeps the bytes of the CPU's tensors in a file. Their addresses stay reserved: the kernel
    takes back whole pages, and gives fresh ones at the next use.
    """

    def __init__(self, folder: Path) -> None:
        """Start without a file, which is made in this folder."""
        self._folder = folder
        self._file: int | None = None
        self._kept: list[torch.UntypedStorage] = []

    def move_away(
        self, kept: Sequence[torch.UntypedStorage], dropped: Sequence[torch.UntypedStorage]
    ) -> int:
        """Write, and free; see `Host`."""
        try:
            self._write(kept)
        except OSError as error:
            num_bytes = sum(storage.nbytes() for storage in kept)
            raise EnvironmentProblem(
                f"devices.time_share writes {num_bytes} bytes into {self._folder} to free memory, "
                f"and they can't be written: {error}; make room there, or set "
                "devices.time_share = false"
            ) from error
        self._kept = list(kept)
        return sum(_free_pages(storage) for storage in (*kept, *dropped))

    def bring_back(self) -> None:
        """Read; see `Host`."""
        offset = 0
        for storage in self._kept:
            content = _view(storage)
            while content:
                num_read = self._read(content[:MAX_CALL_BYTES], offset)
                content, offset = content[num_read:], offset + num_read

    def _write(self, storages: Sequence[torch.UntypedStorage]) -> None:
        if self._file is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._file, name = tempfile.mkstemp(dir=self._folder)
            Path(name).unlink()
            weakref.finalize(self, os.close, self._file)
        offset = 0
        for storage in storages:
            content = _view(storage)
            while content:
                written = os.pwrite(self._file, content[:MAX_CALL_BYTES], offset)
                content, offset = content[written:], offset + written

    def _read(self, target: memoryview, offset: int) -> int:
        assert self._file is not None, "something was written"
        try:
            if num_read := os.preadv(self._file, [target], offset):
                return num_read
            problem = f"the file ends at {offset}"
        except OSError as error:
            problem = str(error)
        raise EnvironmentProblem(
            f"the memory that devices.time_share wrote into {self._folder} can't be read back: "
            f"{problem}; check the disk, or set devices.time_share = false"
        )


def _storages(tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
    """Return the memory of tensors, or of this rank's pieces of them, each once, by address."""
    pieces = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    storages = (piece.detach().untyped_storage() for piece in pieces)
    return {storage.data_ptr(): storage for storage in storages if storage.nbytes()}


def _view_bytes(storage: torch.UntypedStorage) -> UInt8[Tensor, " bytes"]:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _view(storage: torch.UntypedStorage) -> memoryview:
    content = (ctypes.c_ubyte * storage.nbytes()).from_address(storage.data_ptr())
    return memoryview(content).cast("B")


def _free_pages(storage: torch.UntypedStorage) -> int:
    """Give the whole pages of a storage back to the kernel; return their size in bytes."""
    start, page = storage.data_ptr(), mmap.PAGESIZE
    first, end = -(-start // page) * page, (start + storage.nbytes()) // page * page
    if end <= first:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_DONTNEED
    return 0 if libc.madvise(*arguments) else end - first
