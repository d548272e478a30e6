"""Options of a hostile run description, and secrets that a run file must not hold."""

from __future__ import annotations

from typing import Any

UNPROTECTED: tuple[Any, ...] = (1, "yes", "true", 1.5)
"""Values that some code would take for true, of `allow_unprotected`."""
