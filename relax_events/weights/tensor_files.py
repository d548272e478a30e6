"""Writes safetensors files and the weights of model folders one tensor at a time: memory for one
tensor is enough for a file of any size.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from relax_events.errors import WeightsError
from relax_events.model_folder.tensors import (
    INDEX_FILE,
    SINGLE_FILE,
    TensorLayout,
    render_header,
    render_index,
)


class Tensors(Protocol):
    """Tensors by name, each read when it is asked for."""

    @property
    def layouts(self) -> Mapping[str, TensorLayout]:
        """Dtype and shape of each tensor."""
        ...

    def read(self, name: str) -> Tensor:
        """Return a tensor on the CPU; the caller does not change it."""
        ...


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


def write_weight_files(
    folder: Path,
    files: Sequence[Mapping[str, TensorLayout]],
    read: Callable[[str], Tensor],
    *,
    is_lasting: bool = True,
    report: Callable[[str], None] = lambda _: None,
) -> None:
    """Write the weights of a model folder, with the index of several files.

    Args:
        folder: The folder; exists.
        files: The tensors of each file, in the order of the file.
        read: As in `write_tensor_file`.
        is_lasting: As in `write_tensor_file`.
        report: Called with a line for each file.
    Raises:
        OSError: A file can't be written.
        WeightsError: A tensor has another shape.
    """
    count = len(files)
    named = {
        SINGLE_FILE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors": layouts
        for number, layouts in enumerate(files, start=1)
    }
    for name, layouts in named.items():
        report(f"writing {name}")
        write_tensor_file(folder / name, layouts, read, is_lasting=is_lasting)
    if count > 1:
        (folder / INDEX_FILE).write_bytes(render_index(named))


def lay_out_file(tensors: Mapping[str, Tensor]) -> dict[str, TensorLayout]:
    """Return the layouts of a file's tensors in its order: wide dtypes first, so that each tensor
    starts at a multiple of its element's size.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    return {
        name: TensorLayout(dtype_name(tensors[name]), tuple(tensors[name].shape)) for name in order
    }


def dtype_name(tensor: Tensor) -> str:
    """Name a tensor's dtype as manifests do."""
    return str(tensor.dtype).removeprefix("torch.")


def raw_bytes(tensor: Tensor) -> memoryview:
    """Return a tensor's bytes in row-major order; without a copy where they lie so on the CPU."""
    data: memoryview = (
        tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data
    )
    return data
