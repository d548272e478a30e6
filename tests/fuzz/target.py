"""A fuzz target: a name, inputs, and a check that raises on anything but a clear rejection."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hypothesis import strategies as st

SCRATCH = Path(tempfile.gettempdir()) / f"fuzzed-{os.getpid()}"
"""Where targets keep files; the caller removes it."""


@dataclass(frozen=True, slots=True)
class Target:
    """One thing that decodes."""

    name: str
    inputs: st.SearchStrategy[bytes]
    check: Callable[[bytes], object]
    """Takes any bytes; raises where the code under test does something else than to accept them or
    to refuse them by its own error."""
