"""Lays tensors out as the bytes of a safetensors file, copying each once: a checkpoint's writer
needs the memory of its share, and no more.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch
from blake3 import blake3
from torch import Tensor

from relax_events.weights.artifact_writer import dtype_name
from relax_events.weights.tensor_files import (
    ALIGNMENT_BYTES,
    HEADER_LENGTH_BYTES,
    METADATA,
    STORED_DTYPES,
)


def serialize_shard(tensors: Mapping[str, Tensor]) -> memoryview:
    """Return the file; the tensors may change afterwards.

    Args:
        tensors: By name, on any device.
    """
    # wide dtypes first, so that each tensor starts at a multiple of its element's size
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, object] = {"__metadata__": METADATA}
    end = 0
    for name in order:
        tensor = tensors[name]
        begin, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": STORED_DTYPES[dtype_name(tensor)],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT_BYTES)
    prefix = len(text).to_bytes(HEADER_LENGTH_BYTES, "little") + text
    content = torch.empty(len(prefix) + end, dtype=torch.uint8)
    content[: len(prefix)] = torch.frombuffer(bytearray(prefix), dtype=torch.uint8)
    position = len(prefix)
    for name in order:
        tensor = tensors[name].detach()
        part = content[position : position + tensor.nbytes]
        if tensor.nbytes:
            part.view(tensor.dtype).view(tensor.shape).copy_(tensor)
        position += tensor.nbytes
    return content.numpy().data


def digest_weights(tensors: Mapping[str, Tensor]) -> str:
    """Return a digest of the weights alone, by which two checkpoints are compared."""
    digest = blake3()
    for name in sorted(name for name in tensors if name.startswith("model.")):
        values = tensors[name].detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
        digest.update(name.encode())
        digest.update(values.numpy().data)
    return digest.hexdigest()
