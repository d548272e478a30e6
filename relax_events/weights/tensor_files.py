"""Reads tensors from memory-mapped safetensors files, and writes such files one tensor at a time.

Neither needs memory for more than one tensor, whatever the size of a file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from relax_events.errors import WeightsError
from relax_events.weights.file_header import DTYPES, HEADER_LENGTH_BYTES

ALIGNMENT_BYTES = 8
"""Tensors start at a multiple of this, so the header is padded with spaces."""
METADATA = {"format": "pt"}
STORED_DTYPES = {ours: stored for stored, ours in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """Dtype, named as torch does, and shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size of its values."""
        return prod(self.shape) * int(getattr(torch, self.dtype).itemsize)

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


class Tensors(Protocol):
    """Tensors by name, each read when it is asked for."""

    @property
    def layouts(self) -> Mapping[str, TensorLayout]:
        """Dtype and shape of each tensor."""
        ...

    def read(self, name: str) -> Tensor:
        """Return a tensor on the CPU; the caller does not change it."""
        ...


class TensorFiles:
    """The tensors of several safetensors files, which stay mapped: deleting a file does not disturb
    its reader.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        """Open the files and read their headers.

        Raises:
            WeightsError: A file is missing or is no safetensors file; the text names it.
        """
        self._handles: dict[str, Any] = {}
        self.layouts: dict[str, TensorLayout] = {}
        for path in files:
            try:
                handle: Any = safe_open(path, framework="pt")
                for name in handle.keys():  # noqa: SIM118  # it is no mapping
                    part = handle.get_slice(name)
                    dtype = part.get_dtype()
                    self.layouts[name] = TensorLayout(
                        DTYPES.get(dtype, dtype), tuple(part.get_shape())
                    )
                    self._handles[name] = handle
            except (OSError, SafetensorError) as error:
                raise WeightsError(f"{path} can't be read as safetensors: {error}") from error

    def read(self, name: str) -> Tensor:
        """Return a tensor as a view of the mapped file."""
        tensor: Tensor = self._handles[name].get_tensor(name)
        return tensor


def render_header(layouts: Mapping[str, TensorLayout]) -> bytes:
    """Return what a safetensors file has before its tensors.

    Args:
        layouts: The tensors, in the order of the file.
    """
    header: dict[str, Any] = {"__metadata__": METADATA}
    end = 0
    for name, layout in layouts.items():
        begin, end = end, end + layout.num_bytes
        header[name] = {
            "dtype": STORED_DTYPES[layout.dtype],
            "shape": list(layout.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT_BYTES)
    return len(text).to_bytes(HEADER_LENGTH_BYTES, "little") + text


def write_tensor_file(
    path: Path,
    layouts: Mapping[str, TensorLayout],
    read: Callable[[str], Tensor],
    *,
    is_lasting: bool = True,
) -> None:
    """Write a safetensors file; a lasting one is on the disk when this returns.

    Args:
        path: The file; must not exist.
        layouts: The tensors, in the order of the file.
        read: Returns a tensor of that shape; it is converted to that dtype.
        is_lasting: False for a file that need not outlive a crash of the machine.
    Raises:
        OSError: The file can't be written.
        WeightsError: A tensor has another shape.
    """
    header = render_header(layouts)
    with path.open("xb") as file:
        file.write(header)
        for name, layout in layouts.items():
            tensor = read(name).to(getattr(torch, layout.dtype))
            if tuple(tensor.shape) != layout.shape:
                raise WeightsError(f"{name} must be {list(layout.shape)}, got {list(tensor.shape)}")
            file.write(raw_bytes(tensor))
        if is_lasting:
            file.flush()
            os.fsync(file.fileno())


def dtype_name(tensor: Tensor) -> str:
    """Name a tensor's dtype as manifests do."""
    return str(tensor.dtype).removeprefix("torch.")


def raw_bytes(tensor: Tensor) -> memoryview:
    """Return a tensor's bytes in row-major order; without a copy where they lie so on the CPU."""
    data: memoryview = (
        tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data
    )
    return data
