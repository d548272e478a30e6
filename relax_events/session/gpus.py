"""The GPUs of this machine that this process may use, found by `nvidia-smi` without torch."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass

VISIBLE = "CUDA_VISIBLE_DEVICES"
GPU_QUERY = ("--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits")
QUERY_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU.

    Attributes:
        name: By which `CUDA_VISIBLE_DEVICES` selects it: index or UUID.
        num_bytes: Its memory.
    """

    name: str
    num_bytes: int


def find_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs in the order in which a process sees them; none where there is no driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    try:
        output = subprocess.run(
            [program, *GPU_QUERY], capture_output=True, text=True, timeout=QUERY_SECONDS, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    return parse_gpus(output, visible=os.environ.get(VISIBLE))


def parse_gpus(output: str, *, visible: str | None) -> tuple[Gpu, ...]:
    """Return the visible GPUs, in the order of `visible`.

    Args:
        output: Lines of `nvidia-smi`: index, UUID, MiB.
        visible: `CUDA_VISIBLE_DEVICES`, indices or beginnings of UUIDs; None shows all. As for
            CUDA, names after the name of a missing GPU are not visible either.
    """
    rows = [[word.strip() for word in line.split(",")] for line in output.splitlines()]
    gpus = [(index, uuid, int(mib) * 2**20) for index, uuid, mib in rows if mib.isdigit()]
    if visible is None:
        return tuple(Gpu(index, num_bytes) for index, _, num_bytes in gpus)
    visible_gpus: list[Gpu] = []
    for name in (part.strip() for part in visible.split(",")):
        memory = next(
            (
                size
                for index, uuid, size in gpus
                if name and (name == index or uuid.startswith(name))
            ),
            None,
        )
        if memory is None:
            break
        visible_gpus.append(Gpu(name, memory))
    return tuple(visible_gpus)
