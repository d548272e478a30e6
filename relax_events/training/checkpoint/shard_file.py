"""Lays tensors out as the bytes of a safetensors file, copying each once: a checkpoint's writer
needs the memory of its share, and no more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from blake3 import blake3
from torch import Tensor

from relax_events.weights.artifact_writer import dtype_name
from relax_events.weights.tensor_files import TensorLayout, render_header


@dataclass(frozen=True, slots=True)
class ShardFile:
    """A safetensors file in memory, and where in it each tensor's values are."""

    content: memoryview
    spans: Mapping[str, slice]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> ShardFile:
        """Copy tensors into a file; they may change afterwards.

        Args:
            tensors: By name, on any device.
        """
        # wide dtypes first, so that each tensor starts at a multiple of its element's size
        order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
        header = render_header(
            {
                name: TensorLayout(dtype_name(tensors[name]), tuple(tensors[name].shape))
                for name in order
            }
        )
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        content = torch.empty(len(header) + num_bytes, dtype=torch.uint8)
        content[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        spans: dict[str, slice] = {}
        position = len(header)
        for name in order:
            tensor = tensors[name].detach()
            spans[name] = slice(position, position + tensor.nbytes)
            if tensor.nbytes:
                part = content[spans[name]]
                part.view(tensor.dtype).view(tensor.shape).copy_(tensor)
            position += tensor.nbytes
        return cls(content.numpy().data, spans)

    def digest_weights(self) -> str:
        """Return a digest of the weights alone, by which two checkpoints are compared."""
        digest = blake3()
        for name in sorted(name for name in self.spans if name.startswith("model.")):
            digest.update(name.encode())
            digest.update(self.content[self.spans[name]])
        return digest.hexdigest()
