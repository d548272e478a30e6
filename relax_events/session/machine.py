"""The machine that the workers run on: its processors, memory and GPUs, found without torch."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping

import psutil

from relax_events.config.inventory import Machine, num_processors

CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
GPU_QUERY = ("--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits")
QUERY_SECONDS = 20.0


def inspect_machine(roles: Mapping[str, int]) -> Machine:
    """Return the resources of the machine that this process may use.

    Args:
        roles: Number of workers of each role on it; a trainer counts as its ranks.
    """
    return Machine(num_processors(), _memory(), _gpus(), dict(roles))


def _memory() -> int:
    """Return the machine's memory, or the limit of this process's container."""
    found: int = psutil.virtual_memory().total
    for path in CGROUP_LIMITS:
        try:
            with open(path) as file:
                found = min(found, int(file.read()))
        except (OSError, ValueError):  # no such limit, or "max"
            continue
    return found


def _gpus() -> tuple[int, ...]:
    """Return the memory of each GPU that this process may use, in bytes; nothing where there is no
    driver.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    try:
        output = subprocess.run(
            [program, *GPU_QUERY], capture_output=True, text=True, timeout=QUERY_SECONDS, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    return parse_gpu_memory(output, visible=os.environ.get("CUDA_VISIBLE_DEVICES"))


def parse_gpu_memory(output: str, *, visible: str | None) -> tuple[int, ...]:
    """Return the bytes of each visible GPU.

    Args:
        output: Lines of `nvidia-smi`: index, UUID, MiB.
        visible: `CUDA_VISIBLE_DEVICES`; None shows all.
    """
    found: list[int] = []
    wanted = None if visible is None else [name.strip() for name in visible.split(",")]
    for line in output.splitlines():
        index, uuid, mib = (word.strip() for word in line.split(","))
        if mib.isdigit() and (
            wanted is None
            or any(name and (name == index or uuid.startswith(name)) for name in wanted)
        ):
            found.append(int(mib) * 2**20)
    return tuple(found)
