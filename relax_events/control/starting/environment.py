"""The environment of workers."""

from __future__ import annotations

import os

from relax_events.broker.credentials import SHARED_VARIABLES
from relax_events.control.orphans import VARIABLE


def worker_environment() -> dict[str, str]:
    """Return that of a process of ours: single-threaded numerics unless the user says otherwise, no hub look-ups."""
    defaults = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    return {**defaults, **os.environ, VARIABLE: str(os.getpid())}


def shared_environment() -> dict[str, str]:
    """Return what all workers have in theirs, and no secrets."""
    return {name: value for name, value in worker_environment().items() if name not in SHARED_VARIABLES}
