"""How long something takes."""

from __future__ import annotations

import time
from collections.abc import Callable


def timed(action: Callable[[], object]) -> float:
    """Return the seconds that something takes."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started
