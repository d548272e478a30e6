"""Tensors and the checksums that SGLang's kernel for GPUs computes of them. Run as a program by an
interpreter that has SGLang, it computes the table again, with the kernel in Triton's interpreter:

    TRITON_INTERPRET=1 .venv-sglang/bin/python -m tests.gpu_digests
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Case:
    """A tensor: its dtype, its shape, and how it lies in memory."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    layout: str = "contiguous"

    def build(self) -> Tensor:
        """Return the tensor, of bytes that look random and are the same everywhere."""
        shape = self.shape[::-1] if self.layout == "transposed" else self.shape
        if self.layout == "columns":
            shape = (*shape[:-1], 2 * shape[-1])
        num_bytes = int(np.prod(shape, dtype=np.int64)) * self.dtype.itemsize
        places = np.arange(num_bytes, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        values = (places >> np.uint64(40)).astype(np.uint8)
        if self.dtype == torch.bool:
            values &= np.uint8(1)
        flat = torch.empty(num_bytes // self.dtype.itemsize, dtype=self.dtype)
        flat.view(torch.uint8).copy_(torch.from_numpy(values))
        tensor = flat.reshape(shape)
        if self.layout == "transposed":
            return tensor.permute(*reversed(range(tensor.ndim)))
        return tensor.narrow(-1, 1, self.shape[-1]) if self.layout == "columns" else tensor


DIGESTS = {
    Case(torch.float32, (0,)): "0000000000000000",
    Case(torch.uint8, (1,)): "3d93a6540b54ef2a",
    Case(torch.bool, (7,)): "1ac2e95b185b7233",
    Case(torch.float32, ()): "ef43edb6a36bf3cf",
    Case(torch.bfloat16, (3, 5)): "706c419231ec285f",
    Case(torch.float16, (129, 2)): "1286ff20f8fe05b5",
    Case(torch.float8_e4m3fn, (33, 31)): "e5a93b7fbc35f38b",
    Case(torch.int8, (5, 3, 11)): "d17009c89b28da60",
    Case(torch.int64, (1000,)): "fec87aab493eb9e4",
    Case(torch.float64, (17, 63)): "015eeb9d2a6ebefa",
    Case(torch.float32, (8191,)): "f1cd9a1d01c227fd",
    Case(torch.float32, (8192,)): "cd244b07fce7d904",
    Case(torch.float32, (8193,)): "2830304e5f6ec64f",
    Case(torch.bfloat16, (16383,)): "2a63475933199ce1",
    Case(torch.bfloat16, (16385,)): "8a1ec28a5f6cda58",
    Case(torch.uint8, (3, 21845)): "1aeaac9c50a354f9",
    Case(torch.bfloat16, (64, 300), "transposed"): "f4468fa651c6e0f3",
    Case(torch.float32, (2, 30, 40), "transposed"): "585d481578414c33",
    Case(torch.bfloat16, (150, 333), "columns"): "8184fa5c640e2bb0",
    Case(torch.bfloat16, (257, 256)): "d163832aa44eb786",
    Case(torch.float32, (32768,)): "ba510fbe375af9a1",
    Case(torch.bfloat16, (5, 77, 181)): "d251aae868767138",
}


class OnGpu(torch.Tensor):
    """A tensor on the CPU that SGLang hashes as one on a GPU."""

    is_cuda = True

    def cuda(self, *_: Any, **__: Any) -> OnGpu:
        """Return the tensor, which is already there."""
        return self


def compute_table() -> dict[str, list[str]]:
    """Return the checksums of the kernel, with its sums of tiles added at once, and in more steps."""
    from sglang.kernels.ops.memory.gpu_tensor_hash import gpu_tensor_hash

    return {
        repr(case): [
            f"{gpu_tensor_hash(case.build().as_subclass(OnGpu), reduce_chunk=chunk):016x}"
            for chunk in (1024, 2)
        ]
        for case in DIGESTS
    }


def hash_as_on_a_gpu() -> None:
    """Let a server on a CPU report the checksums of one on a GPU. (Entry point in
    `sglang.srt.plugins`.)
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.utils.weight_checker._hash_tensor",
        lambda original, tensor: original(tensor.as_subclass(OnGpu)),
        HookType.AROUND,
    )


def interpreting_interpreter(python: str, folder: Path) -> str:
    """Write a program that runs an interpreter whose SGLang hashes as on a GPU.

    Args:
        python: The interpreter that has SGLang.
        folder: For the program, and for what reports SGLang of the plugin.
    Returns:
        The program's path.
    """
    (folder / "gpu_digests.py").symlink_to(__file__)
    metadata = folder / "gpu_digests-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: gpu-digests\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\ngpu_digests = gpu_digests:hash_as_on_a_gpu\n"
    )
    program = folder / "python"
    program.write_text(
        f'#!/bin/sh\nPYTHONPATH="{folder}${{PYTHONPATH:+:$PYTHONPATH}}" TRITON_INTERPRET=1 '
        f'exec "{python}" "$@"\n'
    )
    program.chmod(0o755)
    return str(program)


if __name__ == "__main__":
    assert os.environ["TRITON_INTERPRET"] == "1"
    print(json.dumps(compute_table(), indent=1))
