"""Lays tensors out as the bytes of a safetensors file, copying each once, from any device: the
writer of a checkpoint or a version needs the memory of one file, and no more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from relax_events.model_folder.tensors import TensorLayout, render_header
from relax_events.weights.reused_memory import ReusedMemory
from relax_events.weights.tensor_files import lay_out_file


@dataclass(frozen=True, slots=True)
class FileContent:
    """A safetensors file in memory: the layouts of its tensors, in the order of the file, and where
    in it the values of each are.
    """

    memory: UInt8[Tensor, " bytes"]
    layouts: Mapping[str, TensorLayout]
    spans: Mapping[str, slice]

    @classmethod
    def of(
        cls,
        tensors: Mapping[str, Tensor],
        *,
        memory: UInt8[Tensor, " bytes"] | None = None,
        lender: ReusedMemory | None = None,
    ) -> FileContent:
        """Copy tensors into a file; they may change afterwards.

        Args:
            tensors: By name, on any device.
            memory: Memory for the file, used if it is large enough.
            lender: Lends other memory; without it, that is fresh.
        """
        layouts = lay_out_file(tensors)
        header = render_header(layouts)
        num_bytes = len(header) + sum(tensor.nbytes for tensor in tensors.values())
        if memory is None or len(memory) < num_bytes:
            memory = allocate(num_bytes) if lender is None else lender.take(num_bytes)
        content = memory[:num_bytes]
        content[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        spans: dict[str, slice] = {}
        position = len(header)
        for name in layouts:
            tensor = tensors[name].detach()
            spans[name] = slice(position, position + tensor.nbytes)
            if tensor.nbytes:
                content[spans[name]].view(tensor.dtype).view(tensor.shape).copy_(tensor)
            position += tensor.nbytes
        return cls(content, layouts, spans)

    @property
    def content(self) -> memoryview:
        """The file's bytes."""
        content: memoryview = self.memory.numpy().data
        return content

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors, as views of the file."""
        return {
            name: self.memory[self.spans[name]]
            .view(getattr(torch, layout.dtype))
            .view(layout.shape)
            for name, layout in self.layouts.items()
        }


def allocate(num_bytes: int) -> UInt8[Tensor, " bytes"]:
    """Return fresh memory on the CPU. numpy asks for huge pages, torch does not: the first use of
    4 KiB pages costs three times as much as the copy.
    """
    return torch.from_numpy(np.empty(num_bytes, dtype=np.uint8))


def lay_out(
    parts: Iterable[Mapping[str, Tensor]],
    *,
    keep: bool = True,
    lender: ReusedMemory | None = None,
) -> Iterator[FileContent]:
    """Yield a file for each part that has tensors.

    Args:
        parts: Tensors by name, on any device, used until the next part is asked for.
        keep: False if a file is used only until the next file is asked for; all files then use the
            same memory.
        lender: Lends the memory, and drops memory that a whole version did not use.
    """
    memory = None
    for part in parts:
        if part:
            file = FileContent.of(part, memory=memory, lender=lender)
            memory = None if keep else _larger(memory, file.memory)
            yield file
    if lender is not None:
        lender.drop_unused()


def _larger(one: Tensor | None, other: Tensor) -> Tensor:
    return other if one is None or len(other) > len(one) else one


def all_tensors(files: Iterable[FileContent]) -> dict[str, Tensor]:
    """Return the tensors of several files, as views of them."""
    return {name: tensor for file in files for name, tensor in file.tensors.items()}
