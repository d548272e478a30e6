"""Sets up a process that trains: deterministic kernels, memory of a GPU without gaps, and the
generators' states in checkpoints.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
from torch import Tensor

from relax_events.planning.inventory import num_threads

ALLOCATOR_VARIABLES = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}
"""In which a user sets torch's allocator."""
GENERATORS = "rng."
"""How the names of generator states begin in a trainer's state."""


def make_deterministic(device: torch.device, *, threads: int) -> None:
    """Set the number of threads, and deterministic kernels on the CPU, for the process. On a GPU
    the allocator's segments grow, unless an environment variable says otherwise: chunks of several
    sizes would leave gaps of gigabytes between them.

    Args:
        device: On a GPU deterministic kernels would fail or slow down some operations.
        threads: CPU threads; 0 takes all processors that the process may use.
    """
    torch.set_num_threads(num_threads(threads))
    if device.type == "cuda" and not ALLOCATOR_VARIABLES & os.environ.keys():
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")  # noqa: SLF001
    if device.type == "cpu":
        torch.use_deterministic_algorithms(True)
        # Filling costs a pass over each new tensor, and nothing here reads one before it is
        # written.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # set through a module class


def generator_states(device: torch.device) -> dict[str, Tensor]:
    """Return the states of the process's and the device's random generators, by name."""
    states = {f"{GENERATORS}torch": torch.get_rng_state()}
    if device.type == "cuda":
        states[f"{GENERATORS}cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_generators(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Set the generators to states of `generator_states`; that of a missing device is ignored."""
    if f"{GENERATORS}torch" in states:
        torch.set_rng_state(states[f"{GENERATORS}torch"].cpu())
    if f"{GENERATORS}cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states[f"{GENERATORS}cuda"].cpu(), device)
