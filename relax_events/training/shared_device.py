"""A process's turns on the device of its model, which other processes of the machine use too."""

from __future__ import annotations

import os
import queue
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from relax_events.config import RunConfig
from relax_events.runtime.device_turn import DeviceTurn, lock_path
from relax_events.runtime.drain import Drain

if TYPE_CHECKING:
    import torch


def find_lock(config: RunConfig, *, local_rank: int = 0) -> Path:
    """Return the file that is locked for this process's device.

    Args:
        config: The run.
        local_rank: Which of the visible devices is its own.
    """
    from relax_events.models.causal_lm import choose_device  # loads torch, which may be absent

    device = choose_device(config.model.device, local_rank=local_rank)
    return lock_path(config.devices_directory, name_device(device))


def name_device(device: torch.device) -> str:
    """Return a device's name, the same in all processes of the machine: an index of CUDA counts
    the devices that a process sees.
    """
    if device.type != "cuda":
        return device.type
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    index = device.index or 0
    name = visible[index].strip() if index < len(visible) else ""
    return f"{device.type}-{name or index}"


def wait_for_turn(turn: DeviceTurn, drain: Drain) -> bool:
    """Wait until a turn begins; return False when the drain started first."""
    changes: queue.SimpleQueue[None] = queue.SimpleQueue()
    wake = partial(changes.put, None)
    drain.on_start(wake)
    if not turn.ask(wake):
        changes.get()
    return turn.has_begun
